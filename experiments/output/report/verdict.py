"""The report's verdict in three sentences: what was found, how sure it is, and what it does not show."""

from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path

import pandas as pd

from experiments.outcomes import APART
from experiments.output.report.results import Result
from experiments.output.tables import PAIRS_APART, RANK_CORRELATION, Entry, read_entries

NAMED = 3  # methods
SIGNIFICANT = 0.05
PLACE = ["table", "column", "metric"]


def verdict(paper: list[Result], photos: Path, comparable: bool) -> list[str]:
    """Judge by the paper's tables, and the one of photos if it exists; empty until methods are measured and ranked."""
    entries, others = _joined(result.entries.values() for result in paper), _joined([read_entries(photos)])
    pairs, orders = (entries[entries.row == row].dropna(subset="ours") for row in (PAIRS_APART, RANK_CORRELATION))
    if pairs.empty or orders.empty:
        return []
    errors = entries.standard_error.dropna()
    low, middle, high = orders.ours.astype(float).quantile([0, 0.5, 1])
    on_cpu = all(record.machine["gpu"] == "none" for result in paper for record in result.records.values())
    lacking = "" if comparable else "the paper's accuracies, since networks and data differ; nor "
    places = {"In the paper's tables": entries, "; on photos": others}
    found = [f"{place} {_leading(table)}" for place, table in places.items() if table.behind.notna().any()]
    return [
        f"{''.join(found)}.",
        f"One standard error over test images is {errors.min():.1f} to {errors.max():.1f} points, and "
        f"{pairs.ours.sum():.0f} of {pairs['count'].sum():.0f} pairs of methods are more than two apart, not level; "
        f"their order correlates with the paper's by {low:.2f} to {high:.2f} (median {middle:.2f}), "
        f"in {(orders.p_value < SIGNIFICANT).sum()} of {len(orders)} columns by more than chance (p < {SIGNIFICANT}).",
        f"None of this shows {lacking}what another calibration set or seed would change, since each cell was run "
        f"once{'; nor any speed on a GPU' * on_cpu}.",
    ]


def _leading(entries: pd.DataFrame) -> str:
    """Name the methods most often level with the best in a column, and what the first of them loses."""
    shares = entries.dropna(subset="standard_error")
    originals = shares[shares.behind.isna()].groupby(PLACE).ours.max().rename("original")
    methods = shares.dropna(subset="behind").join(originals, on=PLACE)
    counts = (methods.behind <= APART).groupby(methods.row, sort=False).agg(["sum", "size"])
    counts = counts.sort_values("sum", ascending=False, kind="stable").head(NAMED)
    named = [f"{row} in {level} of {size}" for row, level, size in counts.itertuples(name=None)]
    lost = (methods.original - methods.ours)[methods.row == counts.index[0]]
    return (
        f"the best method, or one level with it, is {', then '.join(named)} columns; the first of these "
        f"is {lost.min():.1f} to {lost.max():.1f} points below the original"
    )


def _joined(tables: Iterable[Iterable[Entry]]) -> pd.DataFrame:
    lines = [(number, *astuple(entry)) for number, entries in enumerate(tables) for entry in entries]
    return pd.DataFrame(lines, columns=["table", *Entry.__annotations__])
