"""A budget of the network's own latency: what the search predicts for its plan against new measurements."""

import argparse

import pandas as pd

from experiments.benchmark.setting import Setting, add_precision, add_setting, write_results
from facts.calibration.prepare import Execution
from facts.compression.compress import compress
from facts.cost.speed import batch_seconds
from facts.cost.timing import TimingPolicy
from facts.search.budget import Budget


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ratios", nargs="+", type=float, default=[0.7], help="of the original's latency")
    command.add_argument("--search", default="memvit", help="weights are random: one that runs no network saves time")
    add_precision(command)
    add_setting(command, ["deit_b", "swin_b"])


def run(args: argparse.Namespace) -> None:
    rows, policy = [], TimingPolicy(num_turns=args.repeats, min_seconds=0)
    for network in args.models:
        setting = Setting(network, args)
        model, batch = setting.build()
        images = batch[0]
        for ratio in args.ratios:
            result = compress(
                model,
                [batch],
                estimator="pela",
                search=args.search,
                budget=Budget(ratios={"latency": ratio}),
                execution=Execution(setting.dtype, timing=policy),
            )
            found, summary = result.summary.latency, result.summary
            assert summary.before.flops and summary.after.flops
            networks = {"original": model, "compressed": result.model}
            again = batch_seconds(networks, images, policy, setting.dtype)
            shares = {
                "predicted [%]": found["predicted"] / found["dense"],
                "measured [%]": found["measured"] / found["dense"],
                "measured again [%]": again["compressed"].ratio(again["original"]),
            }
            rows.append(
                {
                    "model": setting.title,
                    "original [ms]": 1000 * again["original"].median,
                    "allowed [%]": 100 * ratio,
                    **{heading: 100 * share for heading, share in shares.items()},
                    "FLOPs [%]": 100 * summary.after.flops / summary.before.flops,
                    "search [s]": summary.seconds["search"],
                }
            )
            write_results("latency", pd.DataFrame(rows), text(args), args)  # immediately: the next takes minutes


def text(args: argparse.Namespace) -> str:
    return (
        f"Random weights and images, ranks by search={args.search}, allotted by measuring. Predicted is what the table "
        "of the layers promises for the plan, and measured is what the search measured when it accepted the plan; "
        f"measured again is the outcome: medians of {args.repeats} turns with the original. Shares are of the "
        "original network's latency for one batch."
    )
