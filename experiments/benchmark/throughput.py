"""Images per second of low-rank networks against the original, eager and compiled."""

import argparse
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import nn

from experiments.benchmark.setting import Setting, add_setting, write_results
from facts.calibration.execution import Execution
from facts.calibration.prepare import prepare
from facts.compression.compress import compress
from facts.cost.speed import Speed, speeds
from facts.cost.timing import TimingPolicy
from facts.decomposition.apply import Plan
from facts.decomposition.parts import OutputUnit, ScoreUnit
from facts.modules.forms import FormName
from facts.modules.linear_calls import copy_with
from facts.saving.structure import with_plan
from facts.search.methods.uniform import Uniform

ORIGINAL = "original"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ratio", type=float, default=0.5, help="of the linear layers' FLOPs")
    command.add_argument("--step", type=int, default=16, help="of the ranks of another network, of the same FLOPs")
    command.add_argument("--compile", action="store_true", help="also under torch.compile, which takes minutes")
    add_setting(command, ["deit_b", "swin_b"])


def run(args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    policy = TimingPolicy(num_turns=args.repeats, min_seconds=0)
    for name in args.models:
        setting = Setting(name, args)
        model, (images, _) = setting.build()
        share = f"{args.ratio:.0%} of the FLOPs"
        networks = {
            ORIGINAL: model,
            share: low_rank(model, args.ratio, 1, "plain", setting.dtype),
            f"{share}, ranks in steps of {args.step}": low_rank(model, args.ratio, args.step, "plain", setting.dtype),
            f"{share}, pivoted, in such steps": low_rank(model, args.ratio, args.step, "pivoted", setting.dtype),
            f"{share}, units": narrower(model, args.ratio, 0.0),
            f"{share}, units, heads of two widths": narrower(model, args.ratio, 0.125),
        }
        for compiled in [False, True][: 1 + args.compile]:
            found = speeds(networks, images, policy, setting.dtype, compiled)
            rows += map(partial(row, setting.title, compiled, found), found)
            write_results("throughput", pd.DataFrame(rows), text(args), args)  # immediately: the next takes minutes


def low_rank(model: nn.Module, ratio: float, step: int, form: FormName, precision: torch.dtype) -> nn.Module:
    """Make a network of uniform ranks; its speed does not depend on its weights."""
    prepared = prepare(model, execution=Execution(precision), input_shape=model.pretrained_cfg["input_size"])
    return compress(prepared, estimator="pela", search=Uniform(rank_multiple=step), ratio=ratio, form=form).model


def narrower(model: nn.Module, ratio: float, apart: float) -> nn.Module:
    """Make a network of units of one ratio, or of scores and outputs that are a share of the width apart from it."""
    prepared = prepare(model, input_shape=model.pretrained_cfg["input_size"], parts="units")
    plan: Plan = {
        name: int(unit.width * (ratio + apart * {ScoreUnit: -1, OutputUnit: 1}.get(type(unit), 0)))
        for name, unit in prepared.units.items()
    }
    return with_plan(copy_with(model), plan, {}, None)


def row(model: str, compiled: bool, found: dict[str, Speed], network: str) -> dict[str, Any]:
    speed = found[network]
    return {
        "model": model,
        "network": network,
        "compiled": "yes" if compiled else "no",
        "images per second": speed.throughput,
        "interquartile range [%]": 100 * speed.spread,
        "speed-up": speed.throughput / found[ORIGINAL].throughput,
        "latency of one image [ms]": 1000 * speed.latency,
        "load [s]": speed.load,
        "peak memory [GiB]": speed.memory and speed.memory / 2**30,
    }


def text(args: argparse.Namespace) -> str:
    return (
        f"Random weights and images, uniform ranks, units of zeros; medians of {args.repeats} turns. The speed-up is "
        "to the original, compiled if the network is, with which it took turns. Loading is from a file that was read "
        "before; memory is that of a GPU."
    )
