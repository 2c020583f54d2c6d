"""`facts export`."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from facts.cli import options
from facts.cli.options import DATA, option


def export(
    folder: options.Folder,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The file to write: .pt2 for PyTorch, .xml for OpenVINO, else ONNX.")
    ],
    int8: Annotated[bool, typer.Option("--int8", help="Eight-bit weights and activations.")] = False,
    data: Annotated[
        str | None,
        option(DATA, "For --int8: images, as for `facts compress`; 300 of them calibrate.", metavar="FOLDER"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs in the batch that is timed.")] = 1,
    architecture: options.Architecture = None,
    sequence_length: options.SequenceLength = None,
) -> None:
    """Write a compressed network as ONNX or for OpenVINO, timed against the original on this CPU, or for PyTorch (pt2).

    [bold]Examples[/]

        facts export deit_half --out deit_half.onnx
        facts export deit_half --out deit_half.xml --int8 --data photos
        facts export deit_half --out deit_half.pt2
        OMP_NUM_THREADS=4 facts export deit_half --batch-size 16 --out deit_half.onnx

    The file takes any batch size; `torch.export.load` reads a pt2, which is not timed. Otherwise the original is
    exported too, with random weights, which do not affect times, but not kept; for int8, so is the compressed network
    in float32. All take turns.
    """
    import torch
    from tabulate import tabulate

    import facts
    from facts.cli.data import data_of
    from facts.cli.models import input_shape, load_result
    from facts.cost.count import meta_input
    from facts.cost.timing import DEFAULT_TIMING
    from facts.modules.networks import noise, reads_tokens
    from facts.saving.export import import_openvino, onnx_call, openvino_call, refuse_without_onnx
    from facts.saving.load import built_by
    from facts.saving.recipes import build_recipe

    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: name the file to write")
    if (int8 or data) and not (int8 and data and out.suffix != ".pt2"):
        raise ValueError("--int8 is for ONNX and OpenVINO, calibrated on images: give a folder of them as --data")
    if out.suffix != ".pt2":
        refuse_without_onnx()
    if out.suffix == ".xml":
        import_openvino(int8)
    compressed = load_result(folder, architecture)[0].model
    if int8 and reads_tokens(compressed):
        raise ValueError("--int8 is calibrated on images, and this network reads tokens")
    calibration = data_of(compressed, data or "", num_workers=0).calibration(compressed) if int8 else None
    shape = meta_input(compressed, input_shape(compressed, sequence_length)).shape[1:]
    batch = noise(compressed, (batch_size, *shape), torch.device("cpu"))
    if out.suffix == ".pt2":
        facts.export_program(compressed, batch, out)
        print(f"saved to {out}")
        return
    original = built_by(architecture) if architecture else build_recipe(compressed.recipe)
    runtime, write, load = (
        ("OpenVINO", facts.export_openvino, openvino_call)
        if out.suffix == ".xml"
        else ("ONNX Runtime", facts.export_onnx, onnx_call)
    )
    with TemporaryDirectory() as temporary:
        files = {name: Path(temporary, f"{name}{out.suffix}") for name in ("original", "compressed")}
        files["in int8" if int8 else "compressed"] = out
        write(original, batch, files["original"])
        write(compressed, batch, files["compressed"])
        error = write(compressed, batch, out, int8=calibration) if int8 else 0.0
        times = DEFAULT_TIMING.times({name: partial(load(file), batch) for name, file in files.items()})
    before = times["original"]
    rows = [(name, f"{1000 * each.median:.4g} ms", f"{each.ratio(before):.1%}") for name, each in times.items()]
    headers = f"{runtime}, batch of {batch_size}", "latency", "remaining"
    print(tabulate(rows, headers=headers, colalign=("left", "right", "right")))
    if int8:
        print(f"\nrelative squared error of the outputs in int8: {error:.2g}")
    print(f"\non {torch.get_num_threads()} threads; saved to {out}")
