"""Errors as a person reads them."""

import sys

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup


class Commands(TyperGroup):
    """Commands that print an error as one red line; with `--traceback`, in full."""

    def invoke(self, ctx):
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe: the caller ends silently
            raise
        except (ImportError, OSError, ValueError) as error:
            if ctx.params["traceback"]:
                raise
            Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
            raise typer.Exit(1) from error
