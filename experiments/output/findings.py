"""What a table says: which methods are best, or level with the best, and in how many columns."""

from collections.abc import Collection
from statistics import mean

import pandas as pd

from experiments.config import Experiment
from experiments.output.entries import Entry, best_of, is_dense, is_method, number, numbers_of
from experiments.record import ERRORS_APART

MOST_NAMED = 4  # methods that are level with the best: more are counted


def leaders_of(experiment: Experiment, entries: Collection[Entry], source: str = "ours") -> tuple[str, str]:
    """Name the methods that are best, or level with the best, in most columns, and their first one's mean over columns.

    They are in the order of their means. The mean is followed by the original's in brackets. Both are empty without two
    methods to compare.
    """
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
    if own.row.nunique() < 2:
        return "", ""
    reads = own.value.map(lambda value: number(value, experiment.ranked_by))
    best = reads == reads[own.groupby("column").value.transform(f"idx{which}")].to_numpy()
    counts = (best | (own.behind.astype(float) <= ERRORS_APART)).groupby(own.row).sum()
    means = own.groupby("row").value.mean().sort_values(ascending=which == "min")
    by_mean = experiment.figure == "ranking"  # which says, too, who is level with the best by the mean
    names = [*means.index[:1]] if by_mean else [name for name in means.index if counts[name] == counts.max()]
    text = "; ".join(names) if len(names) <= MOST_NAMED else f"{names[0]} and {len(names) - 1} others"
    text = f"all {len(counts)}, level" if len(names) == len(counts) else text
    text = f"{experiment.axis_title}: {text}" if experiment.axis_title else text
    num_columns = own.column.nunique()
    where = [f"{counts.max()} of {num_columns} columns"] * bool(counts.max() < num_columns)
    where = ["by the mean; the figure has those that are level"] if by_mean else where
    is_tested = bool(own.behind.notna().any())  # all errors of others are unknown, as the paper's are
    remarks = ", ".join([*where, *["lead not tested"] * (not is_tested and source == "ours")])
    dense = [entry for entry in entries if is_dense(experiment.rows.get(entry.row, []))]
    values = numbers_of(dense, experiment.ranked_by, source)
    of_dense = f" ({number(mean(values), experiment.ranked_by)})" if values else ""
    less = ", less is better" * (which == "min")
    first = number(means[names[0]], experiment.ranked_by)
    return text + f" ({remarks})" * bool(remarks), f"{first}{of_dense}{less}"
