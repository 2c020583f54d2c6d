"""Images per second of low-rank and narrower networks against the original, by runtime and number format."""

import argparse

import pandas as pd
from torch import nn

from experiments.benchmark.setting import Setting, add_setting, write_results
from facts.calibration.prepare import prepare
from facts.compression.compress import compress
from facts.cost.timing import TimingPolicy
from facts.modules.forms import FormName
from facts.modules.linear_calls import copy_with
from facts.parts import Plan, emptied
from facts.saving.runtimes import benchmark
from facts.search.methods.uniform import Uniform

ORIGINAL = "original"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ratio", type=float, default=0.5, help="share of the linear layers' FLOPs")
    command.add_argument("--step", type=int, default=16, help="step of the ranks of a second network, of equal FLOPs")
    command.add_argument("--runtimes", nargs="+", help="such as 'OpenVINO, int8'; default: all that are installed")
    add_setting(command, ["deit_b", "swin_b"])


def run(args: argparse.Namespace) -> None:
    rows = []
    # A batch takes seconds on a CPU, milliseconds on a GPU.
    policy = TimingPolicy(num_turns=args.repeats, min_seconds=0.2 if args.device.startswith("cuda") else 0)
    for name in args.models:
        setting = Setting(name, args)
        model, (images, _) = setting.build()
        share = f"{args.ratio:.0%} of the FLOPs"
        networks = {
            ORIGINAL: model,
            share: low_rank(model, args.ratio, 1, "plain"),
            f"{share}, ranks in steps of {args.step}": low_rank(model, args.ratio, args.step, "plain"),
            f"{share}, pivoted, in such steps": low_rank(model, args.ratio, args.step, "pivoted"),
            f"{share}, units": narrower(model, args.ratio, 0.0),
            f"{share}, units, heads of two widths": narrower(model, args.ratio, 0.125),
        }
        speeds = benchmark(networks, images, runtimes=args.runtimes, int8=[images], timing=policy)
        original = {each.runtime: each for each in speeds if each.network == ORIGINAL}
        rows += [
            {
                "model": setting.title,
                "runtime": each.runtime,
                "network": each.network,
                "images per second": each.throughput,
                "interquartile range [%]": 100 * each.spread,
                "speed-up": each.throughput / original[each.runtime].throughput,
                "speed-up over all": each.throughput / speeds[0].throughput,
                "latency of one image [ms]": 1000 * each.latency,
            }
            for each in speeds
        ]
        write_results("throughput", pd.DataFrame(rows), text(args), args)  # immediately: the next takes minutes


def low_rank(model: nn.Module, ratio: float, step: int, form: FormName) -> nn.Module:
    """Make a network with uniform ranks; its speed does not depend on its weights."""
    prepared = prepare(model, input_shape=model.pretrained_cfg["input_size"])
    return compress(prepared, estimator="pela", search=Uniform(rank_multiple=step), ratio=ratio, form=form).model


def narrower(model: nn.Module, ratio: float, apart: float) -> nn.Module:
    """Make a network with units of one ratio, but scores narrower and outputs wider by the share `apart`."""
    prepared = prepare(model, input_shape=model.pretrained_cfg["input_size"], parts="units")
    signs = {"scores": -1, "outputs": 1}
    plan: Plan = {
        name: int(unit.largest * (ratio + apart * signs.get(name.rpartition(".")[2], 0)))
        for name, unit in prepared.units.items()
    }
    return emptied(copy_with(model), plan, {})


def text(args: argparse.Namespace) -> str:
    return (
        f"Random weights and images, uniform ranks, units with zero weights; medians of {args.repeats} turns, in which "
        "all networks and runtimes took part. The speed-up is over the original in the same runtime and format; over "
        "all, it is over the first row. In bfloat16 and float16, PyTorch's networks have weights of that type. int8 "
        "was calibrated on the batch."
    )
