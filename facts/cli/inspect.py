"""`facts inspect`."""

import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from facts.cli import options

if TYPE_CHECKING:
    from facts.saving.manifest import Manifest

BAR = 12  # columns of text


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that `facts compress` wrote.")],
    as_json: options.Json = False,
) -> None:
    """Show a folder that `facts compress` wrote: provenance, method, cost, accuracy, and every rank.

    [bold]Examples[/]

        facts inspect deit_half
        facts inspect deit_half --json | jq .plan

    The bar is the rank as a share of the largest rank of the layer, or of a unit's width. Only the manifest is loaded.
    """
    from facts.saving.manifest import MANIFEST, WEIGHTS, Manifest
    from facts.saving.validation import refuse_what_is_not_data

    refuse_what_is_not_data(folder)
    manifest = Manifest.read(folder)
    if as_json:
        print((folder / MANIFEST).read_text())
        return
    console = Console()
    base = manifest.base_model or {}
    made_from = ", ".join(base[field] for field in ("name", "source", "sha256") if field in base)
    console.print(literal(f"made from: {made_from or 'not known'}\n{manifest.summary}\n"))
    for name, both in (manifest.metrics or {}).items():
        console.print(literal(f"{name}: " + ", ".join(f"{which} {value:.4g}" for which, value in both.items())))
    console.print(plan_table(manifest, shapes(folder / WEIGHTS, manifest)))
    if manifest.skipped:
        table = Table("layer", "reason", title="left alone", title_justify="left", box=None)
        for name, reason in manifest.skipped.items():
            table.add_row(literal(name), literal(reason))
        console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    console.print(literal(f"versions: {versions}\nfingerprint: {manifest.fingerprint}"))


def literal(text: str) -> Text:
    """Text from someone else, verbatim: without markup, and without characters that control terminals or direction."""
    return Text("".join(char for char in text if char == "\n" or unicodedata.category(char)[0] != "C"))


def plan_table(manifest: "Manifest", shapes: dict[str, tuple[int, int]]) -> Table:
    """Table of the plan, one row per layer or unit."""
    table = Table("part", "shape", "rank", "share", "", title="plan", title_justify="left", box=None)
    for name, rank in manifest.plan.items():
        width = manifest.summary.widths.get(name)
        sizes = (width,) if width else shapes.get(name, ())
        shape = f"{width} wide" if width else " x ".join(map(str, sizes))
        share = rank / min(sizes) if rank and sizes else 1.0
        table.add_row(
            literal(name), shape, "dense" if rank is None else str(rank), f"{share:.0%}", Bar(1, 0, share, width=BAR)
        )
    return table


def shapes(file: Path, manifest: "Manifest") -> dict[str, tuple[int, int]]:
    """Read `(d_out, d_in)` of the layers in a file. Raises as `read_header`."""
    import torch

    from facts.saving.structure import read_header

    found = {}
    for name, tensor in read_header(file).items():
        *others, columns = tensor.shape or (1,)
        stored = name.replace(".parametrizations.", ".").removesuffix(".original")  # of a quantized weight
        found[stored] = (*others, 2 * columns) if tensor.dtype == torch.uint8 else tuple(tensor.shape)
    result = {}
    for name in manifest.plan:
        if f"{name}.left" in found:
            result[name] = found[f"{name}.left"][0], found[f"{name}.right"][1]
        basis, coefficients = (found.get(f"{name}.{part}", ()) for part in ("basis", "coefficients"))
        if len(basis) == len(coefficients) == 2:
            size = sum(coefficients)
            result[name] = (size, basis[1]) if manifest.layouts.get(name, "").endswith("rows") else (basis[0], size)
        for dense in (f"{name}.weight", f"{name.removesuffix('.linear')}.weight"):  # a convolution left as it was
            if dense in found:
                result[name] = found[dense][0], found[dense][1]
    return result
