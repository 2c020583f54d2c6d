"""`facts measure`."""

from pathlib import Path
from typing import Annotated

import typer

from facts.cli import options


def measure(
    model: options.Model,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write, JSON.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs in the batch that is timed.")] = 1,
    form: options.FormName = None,
    convolutions: options.Convolutions = None,
    num_classes: options.NumClasses = None,
    sequence_length: options.SequenceLength = None,
    device: options.Device = None,
    precision: options.Precision = "float32",
) -> None:
    """Time a network and its layers at several ranks on this device, for `facts compress --device-times` elsewhere.

    [bold]Examples[/]

        facts measure timm/deit_tiny_patch16_224 --out board.json
        OMP_NUM_THREADS=2 facts measure timm/convnext_tiny --batch-size 8 --out board.json
        facts compress timm/deit_tiny_patch16_224 --data photos --latency-ms 20 --device-times board.json --out deit

    The network gets random weights, which do not affect times: only a configuration is downloaded. Form, precision,
    number of classes and text length must match the compression.
    """
    import torch

    import facts
    from facts.cli.models import build, input_shape

    network = build(model, "random", num_classes, device)
    shape = input_shape(network, sequence_length)
    times = facts.measure(
        network,
        shape,
        batch_size=batch_size,
        name=model,
        form=form,
        layers=options.layers_of(convolutions),
        precision=getattr(torch, precision),
    )
    times.write(out)
    print(
        f"{model} takes {1000 * times.dense:.4g} ms for a batch of {batch_size} on {times.device}, {times.threads} "
        f"threads, {times.precision}; {len(times.layers)} sizes of layers measured, {times.form}\nsaved to {out}"
    )
