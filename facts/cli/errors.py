"""What a person reads when something is wrong."""

import sys

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup


class Commands(TyperGroup):
    """Commands whose errors are a line in red; with `--traceback`, all there is to know."""

    def invoke(self, ctx):
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # whoever reads has seen enough, such as `head`: the caller ends without a word
            raise
        except (ImportError, OSError, ValueError) as error:
            if ctx.params["traceback"]:
                raise
            Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
            raise typer.Exit(1) from error
