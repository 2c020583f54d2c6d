"""A budget of the network's own latency: the prediction of the search for its plan against new measurements."""

import argparse

import pandas as pd

from experiments.benchmark.results import write_results
from experiments.benchmark.setting import MODELS, Setting, add_setting
from facts.calibration.execution import Execution
from facts.compression.budget import Budget
from facts.compression.compress import compress
from facts.compression.measure import measure
from facts.cost.speed import batch_seconds
from facts.cost.timing import TimingPolicy


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--models", nargs="+", default=["deit_b", "swin_b"], choices=MODELS)
    command.add_argument("--ratios", nargs="+", type=float, default=[0.7], help="of the original's latency")
    command.add_argument("--search", default="memvit", help="random weights: one that runs no network saves time")
    command.add_argument("--predicted", action="store_true", help="by device times, without correction by measuring")
    add_setting(command)


def run(args: argparse.Namespace) -> None:
    rows, policy = [], TimingPolicy(num_turns=args.repeats, min_seconds=0)
    for name in args.models:
        setting = Setting.of(name, args)
        model, batch = setting.build()
        images, times = batch[0], None
        if args.predicted:
            options = {"batch_size": len(images), "precision": setting.dtype, "num_turns": args.repeats}
            times = measure(model, tuple(images.shape[1:]), **options)
        for ratio in args.ratios:
            result = compress(
                model,
                [batch],
                estimator="pela",
                search=args.search,
                budget=Budget(ratios={"latency": ratio}, device_times=times),
                execution=Execution(setting.dtype, timing=policy),
            )
            found, summary = result.summary.latency, result.summary
            assert summary.before.flops and summary.after.flops
            networks = {"original": model, "compressed": result.model}
            again = batch_seconds(networks, images, policy, setting.dtype)
            shares = {
                "predicted [%]": found["predicted"] / found["dense"],
                **({} if times else {"measured [%]": found["measured"] / found["dense"]}),
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
            write_results(
                "latency_predicted" if times else "latency", pd.DataFrame(rows), text(args), args
            )  # immediately: the next takes minutes


def text(args: argparse.Namespace) -> str:
    if args.predicted:
        return (
            f"Random weights and images, ranks by search={args.search}, allotted by what `facts.measure` had found on "
            "this device, as if it were another; shares are of the original network's latency for one batch. Nothing "
            f"is corrected by measuring; measured again is what came of it: medians of {args.repeats} turns with the "
            "original.\n\nWritten by `python -m experiments.benchmark latency --predicted`."
        )
    return (
        f"Random weights and images, ranks by search={args.search}; shares are of the original network's latency for "
        "one batch. Predicted is what the layers' table promises for the plan; measured is what the search accepted, "
        f"and measured again once it was done: medians of {args.repeats} turns with the original. The search's time is "
        "that of the table and of these measurements.\n\n"
        "Written by `python -m experiments.benchmark latency`."
    )
