"""Images per second of ImageNet's loader, by number of workers, against those of a model's passes."""

import argparse
import os
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from experiments.benchmark.data_pass import moment_pass
from experiments.benchmark.results import write_results
from experiments.benchmark.setting import MODELS, Setting, add_setting
from facts.cost.timing import TimingPolicy
from facts.modules.modes import autocast
from facts.tasks import ImageNet

FORWARD, DATA_PASS = "forward pass", "data pass of FACTS"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--root", type=Path, required=True, help="ImageNet in any layout of docs/readings.md")
    command.add_argument("--model", default="deit_b", choices=MODELS)
    command.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2, 8])
    command.add_argument("--images", type=int, default=1024)
    add_setting(command)


def run(args: argparse.Namespace) -> None:
    setting = Setting.of(args.model, args)
    model, batch = setting.build()
    loaders = {f"loader, {number} workers": partial(read, photos(args, number, model)) for number in args.workers}
    with tempfile.TemporaryDirectory() as folder:
        data_pass = moment_pass(model, ["facts"], setting.dtype, Path(folder))
        passes = {
            FORWARD: partial(forward, model, batch[0], setting.dtype),
            DATA_PASS: partial(data_pass.accumulate, [batch]),
        }
        times = TimingPolicy(num_turns=args.repeats, min_seconds=0).times(loaders | passes)
    num_images = dict.fromkeys(loaders, args.images) | dict.fromkeys(passes, setting.batch_size)
    rates = pd.Series({name: num_images[name] / timing.median for name, timing in times.items()})
    ratios = {f"ratio to {what}": rates / rates[what] for what in passes}
    table = pd.DataFrame({"images per second": rates, **ratios}).reset_index(names="what")
    write_results("loader", table, text(setting.title, rates, args), args)


def text(model: str, rates: pd.Series, args: argparse.Namespace) -> str:
    lines = []
    for what in (FORWARD, DATA_PASS):
        enough = [str(number) for number in args.workers if rates[f"loader, {number} workers"] >= rates[what]]
        lines.append(f"- It keeps up with the {what} with this many workers: {', '.join(enough) or 'none of these'}.")
    return (
        f"ImageNet's loader on {args.images} images that were read before, against {model} "
        f"on images that lie ready, each alone; medians of {args.repeats} rounds in which they took turns. Does the "
        "loader keep up?\n\n" + "\n".join(lines) + "\n\n"
        f"The machine has {os.cpu_count()} CPU cores; on a CPU the workers share them with the model. Written by "
        "`python -m experiments.benchmark loader`."
    )


def photos(args: argparse.Namespace, num_workers: int, model: nn.Module) -> Iterable[Any]:
    sizes = {"num_calibration": args.images, "num_sensitivity": 1, "batch_size": args.batch_size}
    return ImageNet(root=args.root, **sizes, num_workers=num_workers).calibration(model)


def read(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


@torch.inference_mode()
def forward(model: nn.Module, images: Tensor, precision: torch.dtype) -> None:
    with autocast(images.device, precision):
        model(images)
