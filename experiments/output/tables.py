"""Tables of an experiment: long CSV, and Markdown and LaTeX with the paper's values beside ours."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from rich.table import Table
from scipy.stats import spearmanr

from experiments.config import Experiment
from experiments.grid import GridCell, Status
from experiments.paper import paper_values
from facts.utils.files import replacing

RANK_CORRELATION = "Spearman"


@dataclass(frozen=True)
class Entry:
    """One value of a table; `difference` is ours minus the paper's, only on the paper's data."""

    row: str
    column: str
    metric: str
    ours: float | None
    paper: float | None
    difference: float | None
    status: Status
    fingerprint: str


def in_paper(entries: Iterable[Entry]) -> bool:
    """Check whether the paper has any of these values."""
    return any(entry.paper is not None for entry in entries)


def entries_of(experiment: Experiment, grid: Iterable[GridCell], comparable: bool) -> list[Entry]:
    """Make the long table: every metric of every cell, the rank correlations last."""
    paper, entries = paper_values(experiment.name), []
    for cell in grid:
        for metric in experiment.metrics:
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
                )
            )
    return entries + rank_correlations(experiment, entries)


def rank_correlations(experiment: Experiment, entries: Iterable[Entry]) -> list[Entry]:
    """Spearman's correlation of our ranking of the methods with the paper's, one for each column."""
    table = pd.DataFrame(map(asdict, entries))
    ranked = table[(table.metric == experiment.ranked_by) & ~table.row.isin(experiment.unranked)]
    correlations = []
    for column in experiment.columns:
        both = ranked[ranked.column == column][["ours", "paper"]].dropna()
        if len(both) > 2 and both.nunique().min() > 1:
            value = float(spearmanr(both.ours, both.paper).statistic)
            correlations.append(Entry(RANK_CORRELATION, column, experiment.ranked_by, value, None, None, "done", ""))
    return correlations


def write_tables(
    experiment: Experiment, entries: list[Entry], folder: Path, properties: Mapping[str, Mapping[str, str]]
) -> None:
    """Write `<name>.csv`, `<name>.md` and `<name>.tex`; `properties` are texts by row and title."""
    wide = wide_table(experiment, entries, properties)
    caption = f"{experiment.title}. {' '.join(experiment.notes)}".replace("%", r"\%")
    contents = {
        "csv": pd.DataFrame(map(asdict, entries)).to_csv(index=False),
        "md": f"# {experiment.title}\n\n{wide.to_markdown(index=False, disable_numparse=True)}\n\n"
        + "".join(f"- {note}\n" for note in experiment.notes),
        "tex": wide.to_latex(index=False, escape=True, caption=caption, label=f"tab:{experiment.name}"),
    }
    for suffix, content in contents.items():
        with replacing(folder / f"{experiment.name}.{suffix}") as path:
            path.write_text(content)


def wide_table(
    experiment: Experiment, entries: list[Entry], properties: Mapping[str, Mapping[str, str]]
) -> pd.DataFrame:
    """Make one line a row of the paper's table; for each column and metric, ours and the paper's as text.

    The ranked metric also has its difference to the paper, if any is known.
    """
    comparable = any(entry.difference is not None for entry in entries)
    published = in_paper(entries)
    by_place = {(entry.row, entry.column, entry.metric): entry for entry in entries}
    lines = []
    for row in _rows(experiment, entries):
        line = {
            experiment.axis or "Method": row,
            **properties.get(row, dict.fromkeys(experiment.properties.values(), "")),
        }
        for column in experiment.columns:
            for metric, title in experiment.metrics.items():
                entry = by_place.get((row, column, metric))
                line[f"{column} {title}"] = _ours(entry)
                if metric == experiment.ranked_by and published:
                    line[f"{column} {title} (paper)"] = number(entry.paper if entry else None)
                    if comparable:
                        line[f"{column} {title} (difference)"] = number(entry.difference if entry else None)
        lines.append(line)
    return pd.DataFrame(lines)


def _rows(experiment: Experiment, entries: list[Entry]) -> list[str]:
    """The rows of the table, the rank correlations last if there are any."""
    return [*experiment.rows, *dict.fromkeys(entry.row for entry in entries if entry.row == RANK_CORRELATION)]


def screen_table(experiment: Experiment, entries: list[Entry]) -> Table:
    """Make a table of the ranked metric alone, ours and in brackets the paper's: narrow enough for a terminal."""
    by_place = {(entry.row, entry.column): entry for entry in entries if entry.metric == experiment.ranked_by}
    brackets = ", in brackets the paper's" if in_paper(entries) else ""
    table = Table(title=f"{experiment.title}: {experiment.metrics[experiment.ranked_by]}{brackets}")
    table.add_column(experiment.axis or "Method", no_wrap=True)
    for column in experiment.columns:
        table.add_column(column, justify="right")
    for row in _rows(experiment, entries):
        line = [by_place.get((row, column)) for column in experiment.columns]
        table.add_row(row, *(f"{_ours(entry)}{_bracketed(entry)}" for entry in line))
    return table


def _bracketed(entry: Entry | None) -> str:
    return "" if entry is None or entry.paper is None else f" ({number(entry.paper)})"


def _ours(entry: Entry | None) -> str:
    if entry is None:
        return ""
    return number(entry.ours) if entry.status == "done" else entry.status


def number(value: float | None) -> str:
    if value is None or pd.isna(value):
        return ""
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"
