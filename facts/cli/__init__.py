"""The command `facts`. Its modules import PyTorch only when a command runs."""

import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from facts.cli.compress import compress, cut, pareto, push, recover
from facts.cli.evaluate import benchmark, evaluate, export
from facts.cli.options import ESTIMATORS, FORMS, SEARCHES, models
from facts.utils.progress import in_lines
from facts.utils.streams import make_output_lasting
from facts.utils.version import __version__

log = logging.getLogger(__name__)

METHODS = {"estimators": ESTIMATORS, "searches": SEARCHES, "forms": FORMS}
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
LARGE = 4 * 2**20  # bytes


class Commands(TyperGroup):
    """Commands that print an error as one red line; with `--traceback`, in full."""

    def main(self, *args, **settings):
        make_output_lasting()
        return super().main(*args, **settings)

    def resolve_command(self, ctx, args):
        ctx.obj = args
        return super().resolve_command(ctx, args)

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            kept = "nothing is kept, but with `--cache FOLDER` the same command continues"
            print(f"interrupted: {kept}", file=sys.stderr)
            raise typer.Exit(130) from None
        except (ImportError, MemoryError, OSError, ValueError) as error:
            if ctx.params["traceback"]:
                raise
            Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
            raise typer.Exit(1) from error


def list_choices(
    kind: Annotated[
        Literal["models", "estimators", "searches", "forms"],
        typer.Argument(metavar="KIND", help="One of these."),
    ],
    part: Annotated[
        str, typer.Argument(metavar="PART", help="Only names that contain this; for models, `*` matches anything.")
    ] = "",
) -> None:
    """List the available models, estimators, searches, or forms.

    [bold]Examples[/]

        facts list models vit_tiny
        facts list estimators
        facts list searches

    The models are torchvision's, and timm's with the tags of their published weights: timm/NAME.TAG; without a tag, the
    first is used. Language models and image classifiers at huggingface.co are called transformers/OWNER/NAME.
    """
    found: Mapping[str, str | list[str]]
    found = models(part) if kind == "models" else {name: text for name, text in METHODS[kind].items() if part in name}
    if not found:
        raise ValueError(f"none of the {kind} has {part!r} in its name: give a shorter part, or none")
    table = Table("name", "published weights" if kind == "models" else "method", box=None)
    for column in table.columns:
        column.overflow = "fold"  # names are never cut
    for name, text in found.items():
        table.add_row(name, text if isinstance(text, str) else ", ".join(text))
    Console().print(table)


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
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also print what was predicted.")] = False,
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
    if (console := Console(stderr=True)).is_terminal:
        handler = RichHandler(console=console, show_time=False, show_path=False)
        logging.basicConfig(format="%(message)s", handlers=[handler])
    else:  # Rich would break and pad lines, which `grep` then misses
        logging.basicConfig(format="%(levelname)-8s %(message)s", stream=sys.stderr)
        ctx.with_resource(in_lines(f"facts {ctx.invoked_subcommand}"))
    logging.getLogger("facts").setLevel(logging.DEBUG if verbose else logging.INFO)
    lists_methods = ctx.invoked_subcommand == "list" and "models" not in ctx.obj
    if "--help" not in ctx.obj and not lists_methods:
        log.info("loading PyTorch, which takes seconds")


def return_freed_memory() -> None:
    """Return the memory of large tensors as soon as they are freed, and use large pages.

    By default glibc keeps blocks of less than 32 MB, fragmented: a sixth of the peak for a DeiT-Tiny.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # which PyTorch reads at its first large tensor
    chosen = {"MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if hasattr(libc := ctypes.CDLL(None), "mallopt") and not chosen:
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
