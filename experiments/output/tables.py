"""Tables of an experiment: long CSV, and Markdown and LaTeX with published values beside ours."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from rich.table import Table
from scipy import stats

from experiments.config import Experiment
from experiments.grid import GridCell, Status
from experiments.outcomes import APART, errors_apart, num_apart, standard_error, unpacked
from experiments.paper import paper_values
from facts.utils.files import replacing

RANK_CORRELATION = "Spearman"
PAIRS_APART = "Pairs apart"
FEWEST_RANKED = 5
LEVEL = "*"  # beside the best of a column, and what is not apart from it
ERRORS = (
    f"± is one standard error over the test images; {LEVEL} marks the best method of a column and those within two "
    "standard errors of it, on the same images. Pairs apart are those with more than two between them."
)


@dataclass(frozen=True)
class Entry:
    """One value of a table; `difference` is ours minus the published one, only on the same data.

    For a share of test samples there are its standard error and, for methods, how far the best of the column is ahead,
    in standard errors of the difference. A rank correlation has the number of methods and its p-value.
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
    behind: float | None = None
    count: int | None = None
    p_value: float | None = None


def in_paper(entries: Iterable[Entry]) -> bool:
    """Check whether the paper has any of these values."""
    return any(entry.paper is not None for entry in entries)


def entries_of(experiment: Experiment, grid: Iterable[GridCell], comparable: bool) -> list[Entry]:
    """Make the long table: every metric of every cell; last, the rank correlations and the pairs apart."""
    grid = list(grid)
    paper, entries, behind = paper_values(experiment.name), [], behind_best(experiment, grid)
    for cell in grid:
        for metric in experiment.metrics:
            outcomes = outcomes_of(cell, metric)
            ours = cell.record.values.get(metric) if cell.record else None
            theirs = paper.get((cell.row, cell.column, metric))
            entries.append(
                Entry(
                    row=cell.row,
                    column=cell.column,
                    metric=metric,
                    ours=ours,
                    paper=theirs,
                    difference=ours - theirs if comparable and ours is not None and theirs is not None else None,
                    status=cell.status,
                    fingerprint=cell.record.fingerprint if cell.record else "",
                    standard_error=None if outcomes is None else standard_error(outcomes),
                    behind=behind.get((cell.row, cell.column)) if metric == experiment.ranked_by else None,
                )
            )
    return entries + rank_correlations(experiment, entries) + pairs_apart(experiment, grid)


def outcomes_of(cell: GridCell, metric: str) -> np.ndarray | None:
    """Which test samples count in a metric; None if it is no share of samples."""
    packed = cell.record.outcomes.get(metric) if cell.record else None
    return None if packed is None else unpacked(packed)


def methods_of(experiment: Experiment, grid: Iterable[GridCell], column: str) -> dict[str, np.ndarray]:
    """The outcomes of every method in a column by row; the original network is none."""
    found = {cell.row: outcomes_of(cell, experiment.ranked_by) for cell in grid if cell.column == column}
    return {row: each for row, each in found.items() if each is not None and not is_dense(experiment.rows[row])}


def is_dense(overrides: list[str]) -> bool:
    """Whether a row's overrides leave the network as it is."""
    return "estimator=none" in overrides and not any(override.startswith("pruning=") for override in overrides)


def behind_best(experiment: Experiment, grid: list[GridCell]) -> dict[tuple[str, str], float]:
    """How far the best method of a column is ahead of each, in standard errors, by row and column."""
    behind: dict[tuple[str, str], float] = {}
    for column in experiment.columns:
        methods = methods_of(experiment, grid, column)
        best = max(methods.values(), key=np.mean, default=None)
        behind |= {(row, column): errors_apart(best, each) for row, each in methods.items() if best is not None}
    return behind


def pairs_apart(experiment: Experiment, grid: list[GridCell]) -> list[Entry]:
    """The number of pairs of methods more than two standard errors apart, and of all pairs, one for each column."""
    entries = []
    for column in experiment.columns:
        methods = list(methods_of(experiment, grid, column).values())
        if len(methods) > 1:
            count = len(methods) * (len(methods) - 1) // 2
            entries.append(
                Entry(PAIRS_APART, column, experiment.ranked_by, num_apart(methods), None, None, "done", count=count)
            )
    return entries


def rank_correlations(experiment: Experiment, entries: Iterable[Entry]) -> list[Entry]:
    """Spearman's correlation of our ranking of five methods or more with the published one, one for each column."""
    table = pd.DataFrame(map(asdict, entries))
    ranked = table[(table.metric == experiment.ranked_by) & ~table.row.isin(experiment.unranked)]
    correlations = []
    for column in experiment.columns:
        both = ranked[ranked.column == column][["ours", "paper"]].dropna()
        if len(both) >= FEWEST_RANKED and both.nunique().min() > 1:
            value, p_value = spearman(both.ours.to_numpy(), both.paper.to_numpy())
            entry = Entry(RANK_CORRELATION, column, experiment.ranked_by, value, None, None, "done")
            correlations.append(replace(entry, count=len(both), p_value=p_value))
    return correlations


def spearman(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Spearman's correlation, and its p-value by permutation: exact for up to eight values."""
    ranks, others = (stats.zscore(stats.rankdata(values)) for values in (first, second))
    found = stats.permutation_test(
        (ranks,),
        lambda ranks, axis: (ranks * others).mean(axis=axis),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=50_000,
        rng=0,
    )
    return float(found.statistic), float(found.pvalue)


def write_tables(
    experiment: Experiment, entries: list[Entry], folder: Path, properties: Mapping[str, Mapping[str, str]]
) -> None:
    """Write `<name>.csv`, `<name>.md` and `<name>.tex`; `properties` are texts by row and title."""
    wide = wide_table(experiment, entries, properties)
    notes = notes_of(experiment, entries)
    caption = f"{experiment.title}. {' '.join(notes)}".replace("%", r"\%")
    contents = {
        "csv": pd.DataFrame(map(asdict, entries)).astype({"count": "Int64"}).to_csv(index=False),
        "md": f"# {experiment.title}\n\n{wide.to_markdown(index=False, disable_numparse=True)}\n\n"
        + "".join(f"- {note}\n" for note in notes),
        "tex": wide.to_latex(index=False, escape=True, caption=caption, label=f"tab:{experiment.name}"),
    }
    for suffix, content in contents.items():
        with replacing(folder / f"{experiment.name}.{suffix}") as path:
            path.write_text(content)


def wide_table(
    experiment: Experiment, entries: list[Entry], properties: Mapping[str, Mapping[str, str]]
) -> pd.DataFrame:
    """Make one line a row; for each column and metric, ours and the published value as text.

    The ranked metric also has its difference to the paper, if any is known.
    """
    comparable = any(entry.difference is not None for entry in entries)
    published = in_paper(entries)
    by_place = {(entry.row, entry.column, entry.metric): entry for entry in entries}
    lines = []
    for row in _rows(experiment, entries):
        line = {
            experiment.axis_title or "Method": row,
            **properties.get(row, dict.fromkeys(experiment.properties.values(), "")),
        }
        for column in experiment.columns:
            for metric, title in experiment.metrics.items():
                entry = by_place.get((row, column, metric))
                line[f"{column} {title}"] = ours_as_text(entry)
                if metric == experiment.ranked_by and published:
                    line[f"{column} {title} ({experiment.published_in})"] = number(entry.paper if entry else None)
                    if comparable:
                        line[f"{column} {title} (difference)"] = number(entry.difference if entry else None)
        lines.append(line)
    return pd.DataFrame(lines)


def _rows(experiment: Experiment, entries: list[Entry]) -> list[str]:
    """The rows of the table; last, if there are any, the rank correlations and the pairs apart."""
    return [*experiment.rows, *dict.fromkeys(entry.row for entry in entries if entry.row not in experiment.rows)]


def screen_table(experiment: Experiment, entries: list[Entry]) -> Table:
    """Make a table of the ranked metric alone, ours and in brackets the published one: narrow enough for a terminal."""
    by_place = {(entry.row, entry.column): entry for entry in entries if entry.metric == experiment.ranked_by}
    brackets = f", in brackets the {experiment.published_in}'s" if in_paper(entries) else ""
    table = Table(title=f"{experiment.title}: {experiment.metrics[experiment.ranked_by]}{brackets}")
    table.add_column(experiment.axis_title or "Method", no_wrap=True)
    for column in experiment.columns:
        table.add_column(column, justify="right")
    for row in _rows(experiment, entries):
        line = [by_place.get((row, column)) for column in experiment.columns]
        table.add_row(row, *(f"{ours_as_text(entry)}{_bracketed(entry)}" for entry in line))
    return table


def _bracketed(entry: Entry | None) -> str:
    return "" if entry is None or entry.paper is None else f" ({number(entry.paper)})"


def ours_as_text(entry: Entry | None) -> str:
    """Our value, with its error, or what the row beneath the methods says; the state of a cell that is not done."""
    if entry is None:
        return ""
    if entry.status != "done":
        return entry.status
    if entry.p_value is not None:
        return f"{number(entry.ours)} (n={entry.count}, p={entry.p_value:.2g})"
    if entry.count is not None:
        return f"{entry.ours:.0f} of {entry.count}"
    error = "" if entry.standard_error is None else f" ± {entry.standard_error:.1f}"
    return number(entry.ours) + error + (LEVEL if is_level(entry) else "")


def is_level(entry: Entry) -> bool:
    """Whether the entry is the best method of its column, or not apart from it."""
    return entry.behind is not None and entry.behind <= APART


def notes_of(experiment: Experiment, entries: Iterable[Entry]) -> list[str]:
    """The notes below a table, with one on its errors if it has any."""
    return [*experiment.notes, *([ERRORS] if any(entry.standard_error is not None for entry in entries) else [])]


def number(value: float | None) -> str:
    if value is None or pd.isna(value):
        return ""
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"
