"""`facts quantize`."""

from typing import Annotated, Literal

import typer

from facts.cli import options


def quantize(
    folder: options.Folder,
    out: options.Out,
    weights: Annotated[Literal["int8", "int4"], typer.Option(help="One byte per weight, or half a byte.")] = "int8",
    group_size: Annotated[
        int | None, typer.Option(min=2, help="Neighbours that share a scale; default: a row for int8, 32 for int4.")
    ] = None,
    architecture: options.Architecture = None,
) -> None:
    """Store a compressed network's weights as integers: a smaller file, products in floating point as before.

    [bold]Examples[/]

        facts quantize deit_half --out deit_int8
        facts quantize deit_half --weights int4 --group-size 64 --out deit_int4

    Recover first and quantize last: the result cannot be trained. `facts evaluate` measures the loss.
    """
    import facts
    from facts.cli.models import load_result
    from facts.saving.manifest import WEIGHTS
    from facts.saving.save import target_folder

    target_folder(out)
    result = facts.quantize(load_result(folder, architecture)[0], weights, group_size)
    facts.save_compressed(result, out)
    print(f"{result}\n\nsaved to {out}: weights of {(out / WEIGHTS).stat().st_size / 1e6:.4g} MB")
