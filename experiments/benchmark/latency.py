"""A budget of the network's own latency: what the search predicts for its plan, and what is measured again."""

import argparse

import pandas as pd
import torch

from experiments.benchmark.results import write_results
from experiments.benchmark.setting import MODELS, Setting, add_setting
from facts.compression import compress
from facts.hardware import TimingPolicy


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--models", nargs="+", default=["deit_b", "swin_b"], choices=MODELS)
    command.add_argument("--ratios", nargs="+", type=float, default=[0.7], help="of the original's latency")
    command.add_argument("--search", default="flar", help="any that needs no sensitivity: weights are random")
    add_setting(command)


def run(args: argparse.Namespace) -> None:
    rows, policy = [], TimingPolicy(num_turns=args.repeats, min_seconds=0)
    for name in args.models:
        setting = Setting.of(name, args)
        model, batch = setting.build()
        for ratio in args.ratios:
            result = compress(
                model, [batch], estimator="pela", search=args.search, ratio=ratio, cost="latency",
                precision=setting.dtype, timing=policy,
            )  # fmt: skip
            found, summary = result.summary.latency, result.summary
            share = found["measured"] / found["measured_dense"]
            rows.append(
                {
                    "model": setting.title,
                    "original [ms]": 1000 * found["measured_dense"],
                    "allowed [%]": 100 * ratio,
                    "predicted [%]": 100 * found["predicted"] / found["dense"],
                    "measured [%]": 100 * share,
                    "measured / allowed": share / ratio,
                    "FLOPs [%]": 100 * summary.after.flops / summary.before.flops,
                    "search [s]": summary.seconds["search"],
                }
            )
            write_results("latency", pd.DataFrame(rows), text(args), args)  # at once: the next takes minutes
        torch.cuda.empty_cache()


def text(args: argparse.Namespace) -> str:
    return (
        f"Random weights and images, ranks by search={args.search}; shares are of the original network's latency for "
        f"one batch. Predicted is what the layers' table promises for the plan; measured are medians of {args.repeats} "
        "turns with the original, afterwards. The search's time is that of the table.\n\n"
        "Written by `python -m experiments.benchmark latency`."
    )
