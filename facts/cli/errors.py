"""What a person reads when something is wrong."""

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup


class Commands(TyperGroup):
    """Commands whose errors are a line in red; with `--traceback`, all there is to know."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (ImportError, OSError, ValueError) as error:
            if ctx.params["traceback"]:
                raise
            Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
            raise typer.Exit(1) from error
