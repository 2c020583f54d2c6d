"""`facts benchmark`."""

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from facts.cli import options
from facts.cli.options import DATA, option


def benchmark(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Networks or compressed folders; the first is the baseline."),
    ],
    runtime: Annotated[
        list[str] | None, typer.Option(help='Such as "OpenVINO, int8"; repeat for several. Default: all available.')
    ] = None,
    data: Annotated[
        str | None,
        option(DATA, "Images, as for `facts compress`, to calibrate int8.", metavar="FOLDER"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs in the batch that is timed.")] = 16,
    turns: Annotated[int, typer.Option(min=2, help="Timed turns of each; the median counts.")] = 7,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A CSV file to write.")] = None,
    architecture: options.Architecture = None,
    sequence_length: options.SequenceLength = None,
    device: options.Device = None,
) -> None:
    """Time networks with the same inputs in each runtime and number format: which is fastest here?

    [bold]Examples[/]

        facts benchmark timm/deit_small_patch16_224 deit_half timm/deit_tiny_patch16_224
        facts benchmark timm/deit_tiny_patch16_224 deit_half --data photos --runtime "OpenVINO, int8"
        OMP_NUM_THREADS=4 facts benchmark deit_half --batch-size 1 --out board.csv

    PyTorch, eager and compiled; on a CPU also ONNX Runtime and OpenVINO where they are installed, on a GPU CUDA
    graphs. Named networks get random weights, which do not affect times: only a configuration is downloaded.
    All take turns; speed-ups are relative to the first row.
    """
    import torch
    from tabulate import tabulate

    import facts
    from facts.cli.data import data_of
    from facts.cli.models import input_shape, load
    from facts.cost.count import meta_input
    from facts.cost.timing import TimingPolicy
    from facts.modules.networks import noise
    from facts.saving.manifest import MANIFEST
    from facts.utils.files import replacing
    from facts.utils.processors import device_name

    folders = {name: (Path(name) / MANIFEST).is_file() for name in models}
    networks = {
        name: load(name, None if saved else "random", None, device, architecture if saved else None)
        for name, saved in folders.items()
    }
    first = networks[models[0]]
    shapes = {name: input_shape(network, sequence_length) for name, network in networks.items()}
    if others := [name for name in shapes if shapes[name] != shapes[models[0]]]:
        both = f"{others[0]} reads inputs {list(shapes[others[0]])}, and {models[0]} {list(shapes[models[0]])}"
        raise ValueError(f"{both}: time networks of other inputs in another run")
    shape = meta_input(first, shapes[models[0]]).shape[1:]
    batch = noise(first, (batch_size, *shape), next(first.parameters()).device)
    calibration = data_of(first, data, num_workers=0).calibration(first) if data else None
    timing = TimingPolicy(num_turns=turns)
    speeds = facts.benchmark(networks, batch, runtimes=runtime, int8=calibration, timing=timing)
    conditions = {
        "batch_size": batch_size,
        "device": device_name(batch.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    table = [asdict(each) | {"speed_up": each.throughput / speeds[0].throughput} | conditions for each in speeds]
    headers = ("network", "runtime", f"samples/s, batch of {batch_size}", "spread", "one sample", "speed-up")
    formats = {"throughput": "{:.4g}", "spread": "{:.0%}", "latency": "{:.4g} s", "speed_up": "{:.2f}"}
    rows = [
        [row["network"], row["runtime"], *(text.format(row[name]) for name, text in formats.items())] for row in table
    ]
    print(tabulate(rows, headers, disable_numparse=True, colalign=("left", "left", *["right"] * 4)))
    where = "\non {device}, {threads} threads; medians of {turns} turns, spread: interquartile range"
    print(where.format(**conditions, turns=turns))
    if out:
        with replacing(out) as path, path.open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)
        print(f"saved to {out}")
