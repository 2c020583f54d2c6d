"""`facts export`."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from facts.cli import options


def export(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder that `facts compress` wrote.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The ONNX file to write.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs in the batch that is timed.")] = 1,
    architecture: options.Architecture = None,
    sequence_length: options.SequenceLength = None,
) -> None:
    """Write a compressed network as ONNX, and time it against the original in ONNX Runtime on this CPU.

    [bold]Examples[/]

        facts export deit_half --out deit_half.onnx
        OMP_NUM_THREADS=4 facts export deit_half --batch-size 16 --out deit_half.onnx

    The file takes any batch size. The original is exported too, with random weights, on which times do not depend, and
    not kept. Both take turns.
    """
    import torch
    from tabulate import tabulate

    import facts
    from facts.cli.models import input_shape
    from facts.cost.count import meta_input
    from facts.modules.networks import noise
    from facts.saving.export import refuse_without_onnx
    from facts.saving.load import built_by
    from facts.saving.recipes import build_recipe

    refuse_without_onnx()
    compressed = facts.load_compressed(folder, architecture=architecture).model
    original = built_by(architecture) if architecture else build_recipe(compressed.recipe)
    shape = meta_input(compressed, input_shape(compressed, sequence_length)).shape[1:]
    batch = noise(compressed, (batch_size, *shape), torch.device("cpu"))
    with TemporaryDirectory() as temporary:
        files = {"original": Path(temporary, "original.onnx"), "compressed": out}
        for network, file in zip((original, compressed), files.values(), strict=True):
            facts.export_onnx(network, batch, file)
        times = facts.onnx_times(files, batch)
    before, after = times["original"], times["compressed"]
    row = f"latency of {batch_size}", *(f"{1000 * each.median:.4g} ms" for each in (before, after))
    headers = "ONNX Runtime", "original", "compressed", "remaining"
    print(tabulate([(*row, f"{after.ratio(before):.1%}")], headers=headers, colalign=("left", *["right"] * 3)))
    print(f"\non {torch.get_num_threads()} threads; saved to {out}")
