"""Entries of a table: what was measured beside what was published, value by value, with errors."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pandas as pd

from experiments.cell import Cell
from experiments.config import Experiment
from experiments.paper import paper_values
from experiments.record import ERRORS_APART, Status, errors_apart, standard_error, unpacked

NUMBERS = "ours", "paper", "difference", "standard_error", "deviation", "behind"
LESS_IS_BETTER = "distance", "error", "minutes", "perplexity", "time"  # endings of metrics' names


@dataclass(frozen=True)
class Entry:
    """One value of a table; `difference` is ours minus the published one, only on the same data.

    For several draws, ours is the mean, `deviation` their standard deviation, and `fingerprint` that of the first, or
    of the first that failed. A share of test samples has a standard error and, for methods, `behind`: how far the
    column's best is ahead, in standard errors of the difference.
    """

    row: str
    column: str
    metric: str
    ours: float | None
    paper: float | None
    difference: float | None
    status: Status
    fingerprint: str = ""
    standard_error: float | None = None
    deviation: float | None = None
    behind: float | None = None


def places_of(experiment: Experiment) -> list[tuple[str, str]]:
    """Rows and columns of a table, then those of the paper's rows that are not ours, in its columns: its devices."""
    published = dict.fromkeys((row, column) for row, column, _ in paper_values(experiment.name))
    theirs = [place for place in published if place[0] not in experiment.rows and place[1] in experiment.columns]
    return [*product(experiment.rows, experiment.columns), *theirs]


def entries_of(experiment: Experiment, cells: Iterable[Cell], comparable: bool) -> list[Entry]:
    """Make the long table: every metric of every cell."""
    paper, entries = paper_values(experiment.name), []
    places: dict[tuple[str, str], list[Cell]] = {place: [] for place in places_of(experiment)}
    for cell in cells:
        places[cell.row, cell.column].append(cell)
    behind = behind_best(experiment, places)
    for ((row, column), draws), metric in product(places.items(), experiment.metrics):
        outcomes = outcomes_of(draws, metric)
        records = [cell.record for cell in draws if cell.record]
        found, errors = (
            [record.values[name] for record in records if name in record.values] for name in (metric, f"{metric}_error")
        )
        ours = mean(found) if found and len(found) == len(draws) else None
        theirs = paper.get((row, column, metric))
        entries.append(
            Entry(
                row=row,
                column=column,
                metric=metric,
                ours=ours,
                paper=theirs,
                difference=ours - theirs if comparable and ours is not None and theirs is not None else None,
                status=status_of(experiment, row, column, draws),
                fingerprint=fingerprint_of(draws),
                standard_error=(mean(errors) if errors else None) if outcomes is None else standard_error(outcomes),
                deviation=stdev(found) if len(found) == len(draws) > 1 else None,
                behind=behind.get((row, column)) if metric == experiment.ranked_by else None,
            )
        )
    return entries


def fingerprint_of(draws: list[Cell]) -> str:
    """The fingerprint of a draw's record, of one that failed if there is one; empty without records."""
    records = sorted((cell.record for cell in draws if cell.record), key=lambda record: record.status != "failed")
    return records[0].fingerprint if records else ""


def status_of(experiment: Experiment, row: str, column: str, draws: list[Cell]) -> Status:
    """The status of the first draw that is not done, if any; the paper's own rows are."""
    if column in experiment.not_applicable.get(row, {}):
        return "n.a."
    missing: list[Status] = ["missing"] if row in experiment.rows and not draws else []
    return next((status for status in [*missing, *(cell.status for cell in draws)] if status != "done"), "done")


def outcomes_of(draws: list[Cell], metric: str) -> np.ndarray | None:
    """Unpack which test samples count in a metric `[draws, N]`; None if it is not a share of samples."""
    packed = [cell.record.outcomes.get(metric) if cell.record else None for cell in draws]
    return None if None in packed or not packed else np.stack([unpacked(each) for each in packed if each is not None])


def is_dense(overrides: list[str]) -> bool:
    """Check whether a row's overrides leave the network unchanged."""
    return "estimator=none" in overrides and not any(override.startswith("pruning=") for override in overrides)


def behind_best(experiment: Experiment, places: Mapping[tuple[str, str], list[Cell]]) -> dict[tuple, float]:
    """Compute how far a column's best method is ahead of each, in standard errors; the original is no method."""
    methods: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for (row, column), draws in places.items():
        outcomes = outcomes_of(draws, experiment.ranked_by)
        if outcomes is not None and is_method(experiment, row):
            methods[column][row] = outcomes
    behind: dict[tuple, float] = {}
    for column, own in methods.items():
        best = max(own.values(), key=np.mean)
        behind |= {(row, column): errors_apart(best, outcomes) for row, outcomes in own.items()}
    return behind


def read_entries(path: Path) -> list[Entry]:
    """Read the long table; empty if there is none. Raises `ValueError` for another file."""
    if not path.exists():
        return []
    numbers = {name: [""] for name in NUMBERS}  # everything else is text, even a row called "None"
    types = dict.fromkeys(Entry.__annotations__.keys() - numbers, str)
    try:
        table = pd.read_csv(path, dtype=types, na_values=numbers, keep_default_na=False)
        return [Entry(**line) for line in table.astype(object).where(table.notna(), None).to_dict("records")]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, and reproduce writes it again") from error


def is_method(experiment: Experiment, row: str) -> bool:
    """Whether a row is a method's that may be the best: not the original's, a device's, or unranked."""
    return row in experiment.rows and row not in experiment.unranked and not is_dense(experiment.rows[row])


def is_level(entry: Entry) -> bool:
    """Whether a value is its column's best, or not apart from it."""
    return entry.behind is not None and entry.behind <= ERRORS_APART


def numbers_of(entries: Iterable[Entry], metric: str, field: str) -> list[float]:
    return [value for entry in entries if entry.metric == metric and (value := getattr(entry, field)) is not None]


def best_of(metric: str) -> str:
    return "min" if metric.endswith(LESS_IS_BETTER) else "max"


def number(value: float, metric: str = "") -> str:
    if metric.endswith("speedup"):
        return f"{value:.2f}"  # many are close to 1
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"
