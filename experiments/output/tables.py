"""Tables of an experiment: long CSV, and Markdown and LaTeX with published values next to ours."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import hydra
import numpy as np
import pandas as pd
from rich.markup import escape
from rich.table import Table

from experiments.cell import Cell
from experiments.compose import read_file
from experiments.config import Experiment
from experiments.paper import paper_values
from experiments.record import ERRORS_APART, Status, errors_apart, standard_error, unpacked
from facts.utils.files import replacing

SOURCES = ("ours", "paper", "difference")
NUMBERS = (*SOURCES, "standard_error", "deviation", "behind")
LEVEL = "*"  # marks the best of a column, and any method not apart from it
ERRORS = (
    f"± is one standard error over the test images; {LEVEL} marks the best method of a column and those within two "
    "standard errors of it, on the same images."
)
LEAST_DEVIATION = 0.05  # of a cost over draws: less would be shown as 0.0
DEVIATIONS = (
    "Where values differ between {} draws of the calibration sample, the search sample and sampled labels, they are "
    "means, with the standard deviation over draws in brackets; a difference counts if it exceeds two standard errors "
    "by images and two by draws."
)


@dataclass(frozen=True)
class Entry:
    """One value of a table; `difference` is ours minus the published one, only on the same data.

    For several draws, ours is the mean, `deviation` their standard deviation, and `fingerprint` the first's. A share
    of test samples has a standard error and, for methods, `behind`: how far the column's best is ahead, in standard
    errors of the difference.
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


def in_paper(entries: Iterable[Entry]) -> bool:
    """Check whether the paper has any of these values."""
    return any(entry.paper is not None for entry in entries)


def places_of(experiment: Experiment) -> list[tuple[str, str]]:
    """Rows and columns of a table, then those of the paper's rows that are not ours: its devices."""
    published = dict.fromkeys((row, column) for row, column, _ in paper_values(experiment.name))
    theirs = [(row, column) for row, column in published if row not in experiment.rows]
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
        found = [cell.record.values[metric] for cell in draws if cell.record and metric in cell.record.values]
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
                fingerprint=draws[0].record.fingerprint if draws and draws[0].record else "",
                standard_error=None if outcomes is None else standard_error(outcomes),
                deviation=stdev(found) if len(found) == len(draws) > 1 else None,
                behind=behind.get((row, column)) if metric == experiment.ranked_by else None,
            )
        )
    return entries


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
        if outcomes is not None and not is_dense(experiment.rows[row]):
            methods[column][row] = outcomes
    behind: dict[tuple, float] = {}
    for column, own in methods.items():
        best = max(own.values(), key=np.mean)
        behind |= {(row, column): errors_apart(best, outcomes) for row, outcomes in own.items()}
    return behind


def write_tables(experiment: Experiment, entries: list[Entry], folder: Path) -> None:
    """Write `<name>.csv`, `<name>.md` and `<name>.tex`."""
    wide = wide_table(experiment, entries)
    errors = [ERRORS] * any(entry.standard_error is not None for entry in entries)
    draws = [DEVIATIONS.format(experiment.seeds)] * any(entry.deviation is not None for entry in entries)
    notes = [*experiment.notes, *errors, *draws]
    caption = f"{experiment.title}. {' '.join(notes)}".replace("%", r"\%")
    contents = {
        "csv": pd.DataFrame(entries).to_csv(index=False),
        "md": f"# {experiment.title}\n\n{wide.to_markdown(index=False, disable_numparse=True)}\n\n"
        + "".join(f"- {note}\n" for note in notes),
        "tex": wide.to_latex(
            index=False,
            escape=True,
            column_format="l" + "r" * (wide.shape[1] - 1),
            caption=caption,
            label=f"tab:{experiment.name}",
        ),
    }
    for suffix, content in contents.items():
        with replacing(folder / f"{experiment.name}.{suffix}") as path:
            path.write_text(content, encoding="utf-8")


def read_entries(path: Path) -> list[Entry]:
    """Read the long table; empty if there is none. Raises `ValueError` for another file."""
    if not path.exists():
        return []
    numbers = {name: [""] for name in NUMBERS}  # everything else is text, even a row called "None"
    types = {**dict.fromkeys(Entry.__annotations__.keys() - numbers, str)}
    try:
        table = pd.read_csv(path, dtype=types, na_values=numbers, keep_default_na=False)
        return [Entry(**line) for line in table.astype(object).where(table.notna(), None).to_dict("records")]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, and reproduce writes it again") from error


def wide_table(experiment: Experiment, entries: list[Entry]) -> pd.DataFrame:
    """Make one line per row, with one level of headings."""
    table = arrange(experiment, entries, as_text).reset_index()
    heads = ((column, title, source and f"({source})") for column, title, source in table.columns)
    table.columns = pd.Index([" ".join(filter(None, head)) for head in heads])
    return table


def properties_of(experiment: Experiment) -> dict[str, list[str]]:
    """Read the properties of each row's estimator that the table shows."""
    words, found = {True: "yes", False: "no"}, {}
    for row, overrides in experiment.rows.items() if experiment.properties else ():
        names = [override.removeprefix("estimator=") for override in overrides if override.startswith("estimator=")]
        if names and (target := read_file("estimator", names[-1])["_target_"]):
            estimator = hydra.utils.get_class(target)
            found[row] = [words.get(getattr(estimator, name), "") for name in experiment.properties]
    return found


def arrange(
    experiment: Experiment, entries: Collection[Entry], show: Callable[[Entry | None, str], str]
) -> pd.DataFrame:
    """Arrange entries by row, and by column, metric and source, behind the properties.

    FLOPs of small networks are in MFLOPs, without the published values.
    """
    properties, unknown = properties_of(experiment), [""] * len(experiment.properties)
    flops = {entry: entry.ours for entry in entries if entry.metric.startswith("gflops") and entry.ours is not None}
    unit, per_gflop = flops_unit(flops.values())
    scaled = [replace(entry, ours=per_gflop * gflops) for entry, gflops in flops.items()]
    by_place = {(entry.row, entry.column, entry.metric): entry for entry in [*entries, *scaled]}
    known = {(entry.metric, source) for entry in entries for source in SOURCES if getattr(entry, source) is not None}
    titles = {metric: title.replace("GFLOPs", unit) for metric, title in experiment.metrics.items()}
    places = [
        (column, metric, source)
        for column, metric, source in product(experiment.columns, experiment.metrics, SOURCES)
        if source == "ours" or (titles[metric] == experiment.metrics[metric] and (metric, source) in known)
    ]
    heads = [("", title, "") for title in experiment.properties.values()]
    heads += [(column, titles[metric], "" if source == "ours" else source) for column, metric, source in places]
    rows = list(dict.fromkeys([*experiment.rows, *(entry.row for entry in entries)]))
    lines = [
        properties.get(row, unknown)
        + [show(by_place.get((row, column, metric)), source) for column, metric, source in places]
        for row in rows
    ]
    return pd.DataFrame(
        lines, pd.Index(rows, name=experiment.axis_title or "Method"), pd.MultiIndex.from_tuples(heads), object
    )


def flops_unit(gflops: Iterable[float]) -> tuple[str, int]:
    """Choose a unit, MFLOPs if all values are below a GFLOP, and return how many make a GFLOP."""
    return ("GFLOPs", 1) if max(gflops, default=1) >= 1 else ("MFLOPs", 1000)


def screen_table(experiment: Experiment, entries: list[Entry]) -> Table:
    """Make a table of only the ranked metric, ours and the published one in brackets: narrow enough for a terminal."""
    ranked = [replace(entry, deviation=None) for entry in entries if entry.metric == experiment.ranked_by]
    by_place = {(entry.row, entry.column): entry for entry in ranked}
    brackets = ", the paper's in brackets" if in_paper(entries) else ""
    title = f"{experiment.title}: {experiment.metrics[experiment.ranked_by]}{brackets}"
    table = Table(title=escape(title))
    table.add_column(escape(experiment.axis_title or "Method"), no_wrap=True)
    for column in experiment.columns:
        table.add_column(escape(column), justify="right")
    for row in dict.fromkeys([*experiment.rows, *(entry.row for entry in ranked)]):
        line = [by_place.get((row, column)) for column in experiment.columns]
        published = [f" ({number(entry.paper)})" if entry and entry.paper is not None else "" for entry in line]
        table.add_row(
            escape(row), *(as_text(entry) + bracketed for entry, bracketed in zip(line, published, strict=True))
        )
    return table


def as_text(entry: Entry | None, source: str = "ours") -> str:
    """Write a value: ours with its errors, or the status of an unfinished cell."""
    if entry is None or source != "ours":
        return number(getattr(entry, source, None))
    if entry.status != "done":
        return entry.status
    is_share = entry.standard_error is not None
    error = f" ± {entry.standard_error:.1f}" if is_share else ""
    if entry.deviation and (is_share or entry.deviation >= LEAST_DEVIATION):
        error += f" ({entry.deviation:.1f})"
    return number(entry.ours, entry.metric) + error + LEVEL * is_level(entry)


def is_level(entry: Entry) -> bool:
    """Whether a value is its column's best, or not apart from it."""
    return entry.behind is not None and entry.behind <= ERRORS_APART


def number(value: float | None, metric: str = "") -> str:
    if value is None or pd.isna(value):
        return ""
    if metric.endswith("speedup"):
        return f"{value:.2f}"  # many are close to 1
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"
