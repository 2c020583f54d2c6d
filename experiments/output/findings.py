"""Findings of a table: which methods are best, or level with the best, and in how many columns."""

from collections.abc import Collection, Iterable
from statistics import mean
from typing import NamedTuple

import pandas as pd

from experiments.config import Experiment
from experiments.output.entries import Entry, best_of, is_dense, is_method, number, numbers_of
from experiments.record import ERRORS_APART

MOST_NAMED = 3  # methods that are level with the best: more are counted


class Leads(NamedTuple):
    """In how many of `num_columns` each method is the best, or level with it: by method, those in most columns first.

    `means` are over columns. `untested` says that all errors are unknown, as the paper's are.
    """

    counts: pd.Series
    means: pd.Series
    num_columns: int
    untested: bool


def leads_in(experiment: Experiment, entries: Iterable[Entry], source: str = "ours") -> Leads:
    """Count leads in the ranked metric; methods that are equal by columns are in the order of their means."""
    which, titles = best_of(experiment.ranked_by), experiment.row_titles if source == "ours" else {}
    own = pd.DataFrame(
        [
            (titles.get(entry.row, entry.row), entry.column, value, entry.behind if source == "ours" else None)
            for entry in entries
            if entry.metric == experiment.ranked_by and is_method(experiment, entry.row)
            if (value := getattr(entry, source)) is not None
        ],
        columns=["row", "column", "value", "behind"],
    )
    reads = own.value.map(lambda value: number(value, experiment.ranked_by))
    best = reads == reads[own.groupby("column").value.transform(f"idx{which}")].to_numpy()
    counts = (best | (own.behind.astype(float) <= ERRORS_APART)).groupby(own.row).sum()
    means = own.groupby("row").value.mean()
    order = pd.DataFrame({"count": counts, "mean": means if which == "max" else -means})
    order = order.sort_values(["count", "mean"], ascending=False)
    return Leads(counts[order.index], means[order.index], own.column.nunique(), bool(own.behind.isna().all()))


def leaders_of(experiment: Experiment, entries: Collection[Entry], source: str = "ours") -> tuple[str, str]:
    """Name the methods that are best, or level with the best, in most columns, and their first one's mean.

    The mean is followed by the original's in brackets. Both are empty without two methods to compare.
    """
    counts, means, num_columns, untested = leads_in(experiment, entries, source)
    if len(counts) < 2:
        return "", ""
    names = [*counts.index[counts == counts.max()]]
    text = "; ".join(names) if len(names) <= MOST_NAMED + 1 else f"{names[0]} and {len(names) - 1} others"
    text = f"all {len(counts)}, level" if len(names) == len(counts) else text
    text = f"{experiment.axis_title}: {text}" if experiment.axis_title else text
    where = [f"{counts.max()} of {num_columns} columns"] * bool(counts.max() < num_columns)
    remarks = ", ".join([*where, *["lead not tested"] * (untested and source == "ours")])
    dense = [entry for entry in entries if is_dense(experiment.rows.get(entry.row, []))]
    values = numbers_of(dense, experiment.ranked_by, source)
    of_dense = f" ({number(mean(values), experiment.ranked_by)})" if values else ""
    less = ", less is better" * (best_of(experiment.ranked_by) == "min")
    return text + f" ({remarks})" * bool(remarks), f"{number(means.iloc[0], experiment.ranked_by)}{of_dense}{less}"


def finding_of(experiment: Experiment, entries: Iterable[Entry]) -> str:
    """Say which method, or which value of a setting, is best, or level with the best, in most columns, and the next.

    Empty without two to compare.
    """
    counts, _, num_columns, untested = leads_in(experiment, entries)
    if len(counts) < 2:
        return ""
    setting, most = experiment.axis_title, counts.max()
    if counts.min() == num_columns:
        level = f"all {len(counts)} are level with the best" + " in every column" * (num_columns > 1)
        return f"No {setting or 'method'} leads: {level}"
    name, *others = counts.index
    name, where = (
        f"{setting[:1].upper()}{setting[1:]}: {name}" if setting else name,
        f" in {most} of {num_columns} columns",
    )
    together = [other for other in others if counts[other] == most]
    if untested and together:
        return f"{listed([name, *together])} have the best values{where * (num_columns > 1)}, but leads are not tested"
    if untested:
        return f"{name} has the best value{where * (num_columns > 1)}, but its lead is not tested"
    named = listed(together) if 0 < len(together) <= MOST_NAMED else f"{len(together)} of {len(others)} others"
    if num_columns == 1:
        return f"{name} is best" + f", level with {named}" * bool(together)
    text = f"{name} is best or level with the best{where}"
    if together:
        return text + f", {'as is' if len(together) == 1 else 'as are'} {named}"
    second = counts[others].max()
    return text + f"; next: {listed([other for other in others if counts[other] == second])}, in {second}" * bool(
        second
    )


def listed(names: list[str]) -> str:
    """Join names with commas and, at the end, "and"."""
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last
