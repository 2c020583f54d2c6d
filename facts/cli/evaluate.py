"""`facts evaluate`."""

import json
from pathlib import Path
from typing import Annotated

from facts.cli import options
from facts.cli.options import DATA, option


def evaluate(
    model: options.Model,
    data: options.Images,
    unseen: Annotated[
        bool, option(DATA, "Measure only the images that `facts compress` did not calibrate on.", "--unseen")
    ] = False,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    architecture: options.Architecture = None,
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
    the window length: give the same `--sequence-length` as for `facts compress`.

    An encoder (of transformers, or with `--num-classes 0`) is measured on unseen images: by the relative squared error
    and the cosine of its features to the original's (give its weights as `--weights` if they are not published); and,
    if the images have classes, by nearest neighbours and a linear classifier among the other images (scikit-learn).
    """
    import torch
    from tabulate import tabulate

    from facts.cli.data import data_of, measured
    from facts.cli.models import load, original_of
    from facts.cost.count import count_cost
    from facts.modules.networks import is_encoder
    from facts.saving.manifest import MANIFEST

    network = load(model, weights, num_classes, device, architecture)
    reading = {"sequence_length": sequence_length, "batch_size": batch_size, "num_workers": num_workers}
    encodes = is_encoder(network)  # its classes are learned from the other images
    task = data_of(network, data, None, whole=not unseen and not encodes, **reading)
    compared = encodes and (Path(model) / MANIFEST).is_file()
    original = original_of(network, weights, device) if compared else network
    cost = count_cost(network, task.input_shape(network))
    costs = {"flops": cost.flops, "params": cost.params}
    metrics = measured(task, network, original, getattr(torch, precision)) | costs
    if as_json:
        print(json.dumps(metrics, indent=1))
    else:
        rows = [(name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}") for name, value in metrics.items()]
        print(tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=("left", "right")))
