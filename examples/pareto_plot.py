"""Accuracy against cost: two searches at several budgets, as a table and a plot.

    python examples/pareto_plot.py --out curves

One data pass serves all points. A point that is in the table already is not computed again, so a run that was
interrupted continues. In place of the small DeiT and its digits, put your network, your loader and your metric.
"""

from pathlib import Path

import typer
from matplotlib.figure import Figure
from small_networks import small_deit

import facts
from experiments.mini.digits import Digits

RATIOS = (0.2, 0.3, 0.4, 0.5, 0.7)


def main(out: Path = Path("curves")) -> None:
    model, task = small_deit(), Digits(num_calibration=1024)
    out.mkdir(parents=True, exist_ok=True)
    points = facts.pareto(
        model,
        task.calibration(model),
        task.evaluate,  # from a network to {"top1": ...}
        searches=("uniform", "cors_fisher"),
        ratios=RATIOS,
        file=out / "points.csv",
    )
    print(points[["search", "ratio", "flops", "top1"]].to_string(index=False))

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="MFLOPs of an image", ylabel="top-1 accuracy [%]")
    original = points[points.search == "original"].top1.item()
    axes.axhline(original, color="grey", linestyle="--", label="original")
    for search, own in points[points.search != "original"].groupby("search"):
        axes.plot(own.flops / 1e6, own.top1, marker="o", label=search)
    axes.legend()
    figure.savefig(out / "curves.png", dpi=150)


if __name__ == "__main__":
    typer.run(main)
