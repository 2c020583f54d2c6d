"""`facts evaluate`, `export` and `benchmark`: how good a network is, and how fast in each runtime."""

import json
import logging
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

import facts
from facts.cli import options
from facts.cli.options import DATA, option

log = logging.getLogger(__name__)

FAR_IN_INT8 = 0.1  # relative squared error of the outputs; that of zeros is 1


def evaluate(
    model: options.Model,
    data: options.Images,
    unseen: Annotated[bool, option(DATA, "Only images that did not calibrate the network.", "--unseen")] = False,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    sequence_length: options.SequenceLength = None,
    batch_size: options.BatchSize = None,
    num_workers: options.NumWorkers = 2,
    device: options.Device = None,
    precision: options.Precision = "float32",
    as_json: options.Json = False,
) -> None:
    """Measure a network, or a folder that `facts compress` wrote: accuracy or perplexity, FLOPs and parameters.

    [bold]Examples[/]

        facts evaluate deit_half --data photos --unseen
        facts evaluate timm/deit_small_patch16_224 --data photos
        facts evaluate qwen --data test.txt --json

    All images are measured; with `train` and `val` in the folder, all of `val`. For a network that was compressed with
    the same folder, give `--unseen`: without `train` and `val`, half of the images calibrated it. Perplexity depends on
    the window length: give the same `--sequence-length` as for `facts compress`. Without the network's classes, a saved
    one is measured by its agreement with the original (`--weights`, if they are not published).

    An encoder (of transformers, or with `--num-classes 0`) is measured on unseen images: by the relative squared error
    and the cosine of its features to the original's (give its weights as `--weights` if they are not published); and,
    if the images have classes, by nearest neighbours and a linear classifier among the other images (scikit-learn).
    """
    import torch
    from tabulate import tabulate

    from facts.calibration.data import Data
    from facts.cli import inputs
    from facts.modules.networks import is_encoder
    from facts.tasks import ImageFolder

    network, is_saved = inputs.load(model, weights, num_classes, device), inputs.is_saved(model)
    reading = {"sequence_length": sequence_length, "batch_size": batch_size, "num_workers": num_workers}
    encodes = is_encoder(network)  # its classes are learned from the other images
    task = inputs.data_of(network, data, None, whole=not unseen and not encodes, **reading)
    original, held_out = inputs.original_of(network, weights, device) if encodes and is_saved else network, None
    if is_saved and isinstance(task, ImageFolder) and (reason := inputs.no_labels(task, network)):
        if unseen:
            raise ValueError(f"{reason}, so all of them may have calibrated the network: leave out --unseen")
        log.info("%s: the agreement with the original is measured", reason)
        original = inputs.original_of(network, weights, device)
        held_out = Data.of(task.for_features(network)[1], network)
    if weights and is_saved and original is network:
        raise ValueError(inputs.HAS_ITS_OWN.format(model))
    cost = facts.count_cost(network, inputs.input_shape(network, sequence_length))
    found = inputs.measured(task, network, original, getattr(torch, precision), held_out)
    if not is_saved:
        inputs.warn_of_chance(found, network)
    metrics = found | {"flops": cost.flops, "params": cost.params}
    if as_json:
        # JSON has no infinity.
        known = {name: value if isfinite(value or 0) else None for name, value in metrics.items()}
        print(json.dumps(known, indent=1))
    else:
        rows = inputs.with_errors({name: value for name, value in metrics.items() if value is not None}).items()
        print(tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=("left", "right")))


def export(
    folder: options.Folder,
    out: Annotated[Path, options.place(None, "The file: .onnx, .xml for OpenVINO, .pt2 for PyTorch.", "FILE")],
    int8: Annotated[bool, typer.Option("--int8", help="Eight-bit weights and activations.")] = False,
    data: Annotated[
        str | None, option(DATA, "For --int8: images to calibrate it.", metavar="FOLDER", callback=options.existing)
    ] = None,
    sequence_length: options.SequenceLength = None,
) -> None:
    """Write a compressed network as ONNX, for OpenVINO, or for PyTorch (pt2).

    [bold]Examples[/]

        facts export deit_half --out deit_half.onnx
        facts export deit_half --out deit_half.xml --int8 --data photos
        facts export deit_half --out deit_half.pt2

    The file takes any batch size. `facts benchmark` says how fast it is.
    """
    from facts.cli import inputs
    from facts.modules.networks import reads_tokens
    from facts.saving.export import import_openvino, refuse_other_endings, refuse_without_onnx
    from facts.utils.files import writable_folder
    from facts.utils.progress import progress_of

    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: name the file to write")
    refuse_other_endings(out, ".onnx", ".xml", ".pt2")
    writable_folder(out.parent, keep=False)
    if (int8 or data) and not (int8 and data and out.suffix != ".pt2"):
        raise ValueError("--int8 is for ONNX and OpenVINO, calibrated on images: give a folder of them as --data")
    if out.suffix == ".xml":
        import_openvino(int8)
    if out.suffix != ".pt2":
        refuse_without_onnx()
    network = inputs.load_result(folder)[0].model
    if int8 and reads_tokens(network):
        raise ValueError("--int8 is calibrated on images, and this network reads tokens")
    calibration = inputs.data_of(network, data or "", num_workers=0).calibration(network) if int8 else None
    example = inputs.batch_of(network, inputs.input_shape(network, sequence_length), 1)
    with progress_of("export"):
        if out.suffix == ".pt2":
            facts.export_program(network, example, out)
        else:
            write = facts.export_openvino if out.suffix == ".xml" else facts.export_onnx
            error = write(network, example, out, int8=calibration)
    if int8:
        print(f"relative squared error of the outputs in int8: {error:.2g}")
        if error > FAR_IN_INT8:
            log.warning(
                "int8 changes these outputs a lot: measure the accuracy before you use the file, calibrate on more "
                "images, or leave out --int8"
            )
    print(f"saved to {out}" + f" and {out.with_suffix('.bin').name}, which belongs to it" * (out.suffix == ".xml"))


def benchmark(
    models: Annotated[list[str], options.argument("MODEL...", "Networks or folders; the first is the baseline.")],
    runtime: Annotated[
        list[str] | None, typer.Option(help='Such as "OpenVINO, int8"; repeat for several. Default: all available.')
    ] = None,
    data: Annotated[
        str | None, option(DATA, "Images to calibrate int8.", metavar="FOLDER", callback=options.existing)
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs in the batch that is timed.")] = 16,
    sequence_length: options.SequenceLength = None,
    device: options.Device = None,
) -> None:
    """Time networks with the same inputs in each runtime and number format: which is fastest here?

    [bold]Examples[/]

        facts benchmark timm/deit_small_patch16_224 deit_half timm/deit_tiny_patch16_224
        facts benchmark timm/deit_tiny_patch16_224 deit_half --data photos --runtime "OpenVINO, int8"
        OMP_NUM_THREADS=4 facts benchmark deit_half --batch-size 1

    PyTorch, eager and compiled; on a CPU also ONNX Runtime and OpenVINO where they are installed, on a GPU CUDA
    graphs. Named networks get random weights, which do not affect times: only a configuration is downloaded.
    All take turns; speed-ups are relative to the first row.
    """
    import torch
    from tabulate import tabulate

    from facts.cli import inputs
    from facts.utils.distributed import device_name

    networks = {name: inputs.load(name, "random", None, device) for name in models}
    first = networks[models[0]]
    shapes = {name: inputs.input_shape(network, sequence_length) for name, network in networks.items()}
    if others := [name for name in shapes if shapes[name] != shapes[models[0]]]:
        both = f"{others[0]} reads inputs {list(shapes[others[0]])}, and {models[0]} {list(shapes[models[0]])}"
        raise ValueError(f"{both}: time networks of other inputs in another run")
    try:
        batch = inputs.batch_of(first, shapes[models[0]], batch_size)
    except RuntimeError as error:
        raise MemoryError(f"a batch of {batch_size:,} inputs fits no memory: give a smaller --batch-size") from error
    calibration = inputs.data_of(first, data, num_workers=0).calibration(first) if data else None
    speeds = facts.benchmark(networks, batch, runtimes=runtime, int8=calibration)
    headers = ("network", "runtime", f"samples/s, batch of {batch_size}", "spread", "one sample", "speed-up")
    rows = [
        (
            *(each.network, each.runtime, f"{each.throughput:.4g}", f"{each.spread:.0%}"),
            *(f"{1000 * each.latency:.4g} ms", f"{each.throughput / speeds[0].throughput:.2f}"),
        )
        for each in speeds
    ]
    print(tabulate(rows, headers, disable_numparse=True, colalign=("left", "left", *["right"] * 4)))
    where = f"{device_name(batch.device)}, {torch.get_num_threads()} threads"
    print(f"\non {where}; medians of several turns, spread: interquartile range")
