"""The command `facts`. Its modules import PyTorch only when a command runs."""

import ctypes
import logging
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text
from typer.core import TyperGroup

from facts.cli.benchmark import benchmark
from facts.cli.compress import compress
from facts.cli.cut import cut
from facts.cli.evaluate import evaluate
from facts.cli.export import export
from facts.cli.list import list_choices
from facts.cli.pareto import pareto
from facts.cli.push import push
from facts.cli.recover import recover
from facts.utils.version import __version__

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
LARGE = 4 * 2**20  # bytes


class Commands(TyperGroup):
    """Commands that print an error as one red line; with `--traceback`, in full."""

    def invoke(self, ctx):
        try:
            result = super().invoke(ctx)
            print(end="", flush=True)  # here, where a closed pipe is seen
            return result
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe: the caller ends silently
            raise
        except (ImportError, OSError, ValueError) as error:
            if ctx.params["traceback"]:
                raise
            Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
            raise typer.Exit(1) from error


app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode="rich")
for command in (benchmark, compress, cut, evaluate, export, pareto, push, recover):
    app.command()(command)
app.command("list")(list_choices)


def show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
) -> None:
    """Make a pretrained network smaller: a network, some data and a budget in, a smaller network out.

    [bold]Start with[/]

        facts compress timm/deit_small_patch16_224 --data photos --ratio 0.5 --out deit_half
        facts evaluate deit_half --data photos --unseen
        facts recover deit_half --data photos --minutes 30 --out deit_better
        facts list models deit

    `facts COMMAND --help` shows more examples and explains each choice; `facts --install-completion` lets the Tab
    key complete commands, options and names of networks.
    """
    return_freed_memory()
    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False)
    logging.basicConfig(format="%(message)s", handlers=[handler])
    logging.getLogger("facts").setLevel(logging.INFO)


def return_freed_memory() -> None:
    """Return the memory of large tensors as soon as they are freed, and use large pages.

    By default glibc keeps blocks of less than 32 MB, fragmented: a sixth of the peak for a DeiT-Tiny.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # which PyTorch reads at its first large tensor
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
