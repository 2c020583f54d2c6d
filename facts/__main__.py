"""`python -m facts`: the command `facts`."""

from facts.cli import app

app(prog_name="facts")
