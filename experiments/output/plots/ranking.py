"""Methods ranked over all networks, and their accuracy against the time they take."""

from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.outcomes import mean_ranks, unpacked
from experiments.output.plots.colors import BLUE, GREY, VERMILION
from experiments.output.plots.style import Records, panels, say

NUM_DRAWS = 1000
INTERVAL = (2.5, 97.5)  # percentiles
INCHES_A_ROW = 0.15
COLUMNS = ["method", "rank", "rank_low", "rank_high", "level", "accuracy", "minutes", "on_front"]


def ranking(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot the mean ranks of the methods that every column has, and their mean accuracy against their mean minutes.

    95 % intervals of ranks come from a bootstrap over test images, the same for all methods and columns of one size.
    Blue marks the best and those whose rank difference may be zero; the line joins methods that no other beats in both.
    """
    methods = ranked(experiment, records)
    figure, (left, right) = panels(2, max(2.6, 0.9 + INCHES_A_ROW * len(methods)))
    left.set(xlabel="mean rank, 95 % interval")
    right.set(xlabel="minutes, mean", ylabel=f"{experiment.metrics[experiment.ranked_by]} [%], mean", xscale="log")
    if methods.empty:
        say(left)
        say(right)
        return figure, methods
    for is_level, color in ((True, BLUE), (False, GREY)):
        own = methods[methods.level == is_level]
        left.hlines(own.index, own.rank_low, own.rank_high, color=color, linewidth=0.8)
        left.plot(own["rank"], own.index, "o", color=color)
        right.plot(own.minutes, own.accuracy, "o", color=color)
    labels = [f"{method}  {place}" for place, method in enumerate(methods.method, start=1)]
    left.set_yticks(range(len(methods)), labels, fontsize=6)
    left.invert_yaxis()
    left.margins(y=0.02)
    front = methods[methods.on_front].sort_values("minutes")
    right.plot(front.minutes, front.accuracy, color=VERMILION, linewidth=0.8, zorder=0)
    sides = cycle((("right", "bottom"), ("left", "top")))  # alternating, since neighbours may be close
    for place, method, (ha, va) in zip(front.index + 1, front.itertuples(), sides, strict=False):
        right.annotate(f" {place} ", (method.minutes, method.accuracy), fontsize=6, ha=ha, va=va)
    return figure, methods


def ranked(experiment: Experiment, records: Records) -> pd.DataFrame:
    """Rank the methods that have outcomes in every column, the best first."""
    metric = experiment.ranked_by
    lines = {row: [records.get((row, column)) for column in experiment.columns] for row in experiment.rows}
    known = {row: [record for record in line if record and metric in record.outcomes] for row, line in lines.items()}
    methods = [row for row in experiment.rows if row not in experiment.unranked]
    whole = {row: known[row] for row in methods if len(known[row]) == len(experiment.columns)}
    if not whole:
        return pd.DataFrame(columns=COLUMNS)
    columns = zip(*whole.values(), strict=True)
    outcomes = [np.array([unpacked(record.outcomes[metric]) for record in column]) for column in columns]
    sizes = [column.shape[1] for column in outcomes]
    draws = {size: resamples(size) for size in sizes}
    (ranks,) = mean_ranks(outcomes, [np.ones((1, size)) for size in sizes])
    drawn = mean_ranks(outcomes, [draws[size] for size in sizes])
    low, high = np.percentile(drawn, INTERVAL, axis=0)
    ahead = np.percentile(drawn - drawn[:, [ranks.argmin()]], INTERVAL[0], axis=0)
    minutes = [[record.values.get("total_minutes", np.nan) for record in line] for line in whole.values()]
    table = pd.DataFrame(
        {
            "method": list(whole),
            "rank": ranks,
            "rank_low": low,
            "rank_high": high,
            "level": ahead <= 0,
            "accuracy": [np.mean([record.metrics[metric] for record in line]) for line in whole.values()],
            "minutes": np.mean(minutes, axis=1),
        }
    ).sort_values(["rank", "minutes"], ignore_index=True)
    timed = table.fillna({"minutes": np.inf})  # the original needs none
    by_accuracy = timed.sort_values(["accuracy", "minutes"], ascending=[False, True])
    return table.assign(on_front=by_accuracy.minutes < by_accuracy.minutes.cummin().shift(fill_value=np.inf))


def resamples(size: int) -> np.ndarray:
    """Draw how often each test image is taken, `[draws, size]`."""
    return np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), size=NUM_DRAWS)
