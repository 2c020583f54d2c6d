"""`facts export`."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from facts.cli import options


def export(
    folder: options.Folder,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")],
    format: Annotated[
        Literal["onnx", "pt2"] | None, typer.Option(help="Default: pt2 for a FILE of this ending, else onnx.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs in the batch that is timed.")] = 1,
    architecture: options.Architecture = None,
    sequence_length: options.SequenceLength = None,
) -> None:
    """Write a compressed network as ONNX, timed against the original in ONNX Runtime on this CPU, or for PyTorch (pt2).

    [bold]Examples[/]

        facts export deit_half --out deit_half.onnx
        facts export deit_half --out deit_half.pt2
        OMP_NUM_THREADS=4 facts export deit_half --batch-size 16 --out deit_half.onnx

    The file takes any batch size; `torch.export.load` reads a pt2, which is not timed. For ONNX the original is
    exported too, with random weights, on which times do not depend, and not kept. Both take turns.
    """
    import torch
    from tabulate import tabulate

    import facts
    from facts.cli.models import input_shape, load_result
    from facts.cost.count import meta_input
    from facts.modules.networks import noise
    from facts.saving.export import refuse_without_onnx
    from facts.saving.load import built_by
    from facts.saving.recipes import build_recipe

    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: name the file to write")
    is_program = format == "pt2" if format else out.suffix == ".pt2"
    if not is_program:
        refuse_without_onnx()
    compressed = load_result(folder, architecture)[0].model
    shape = meta_input(compressed, input_shape(compressed, sequence_length)).shape[1:]
    batch = noise(compressed, (batch_size, *shape), torch.device("cpu"))
    if is_program:
        facts.export_program(compressed, batch, out)
        print(f"saved to {out}")
        return
    original = built_by(architecture) if architecture else build_recipe(compressed.recipe)
    with TemporaryDirectory() as temporary:
        files = {"original": Path(temporary, "original.onnx"), "compressed": out}
        for network, file in zip((original, compressed), files.values(), strict=True):
            facts.export_onnx(network, batch, file)
        times = facts.onnx_times(files, batch)
    before, after = times["original"], times["compressed"]
    row = f"latency, batch of {batch_size}", *(f"{1000 * each.median:.4g} ms" for each in (before, after))
    headers = "ONNX Runtime", "original", "compressed", "remaining"
    print(tabulate([(*row, f"{after.ratio(before):.1%}")], headers=headers, colalign=("left", *["right"] * 3)))
    print(f"\non {torch.get_num_threads()} threads; saved to {out}")
