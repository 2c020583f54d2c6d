"""Tables of an experiment: one long CSV of everything, and tables to be read at a glance, in Markdown and LaTeX."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from statistics import mean, median, stdev
from textwrap import fill
from typing import Any

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
LEVEL = "*"  # marks methods that are not apart from the best of a column
ERRORS = "± is one standard error."
ALIKE = "Standard errors of {} are {}."
MARKS = (
    f"Bold is the best method of a column; {LEVEL} marks those within two standard errors of it, by images or, if "
    "larger, by draws, not corrected for the number of methods. Pairs are compared image by image, so a lower value "
    "can have a mark that a higher one lacks."
)
DEVIATIONS = (
    "Where values differ between {} draws of the calibration sample, the search sample and sampled labels, they are "
    "means, with standard deviations {}."
)
LATEX = re.compile("[&%$#_{}]")  # what a caption has to escape
BOLD = r"\*\*(.+?)\*\*"
MOST_ALIKE = 3  # times the smallest error: then the caption has all of them
LEAST_ERROR = 0.1  # of a share: others have more digits
LEAST_DEVIATION = 0.05  # over draws: less would be shown as 0.0, and is if it exceeds the error
MOST_NAMED = 3  # methods that are level with the best: more are counted
MEAN = "mean"  # of a ranking's columns
MOST_COLUMNS = 7  # of a table that is read at a glance, with that of the rows' names
MOST_TOGETHER = 4  # columns of several networks in one table
SCREEN = 80  # characters of a terminal
CHARACTERS_OF_HEAD = 8  # per line, in a terminal
SMALLER = {"gflops": ("GFLOPs", "MFLOPs", 1000), "minutes": ("[min]", "[s]", 60)}  # units, by parts of metrics' names
LESS_IS_BETTER = ("distance", "error", "minutes", "perplexity", "time")  # endings of metrics' names


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


def write_tables(experiment: Experiment, entries: list[Entry], folder: Path) -> None:
    """Write `<name>.csv`, `<name>.md` and `<name>.tex`."""
    notes, latex, finding = [*experiment.notes, *notes_on(experiment, entries)], [], finding_of(experiment, entries)
    markdown = [f"# {experiment.title}", *[f"**{finding}.**"] * bool(finding)]
    for number, (heading, panel) in enumerate(panels_of(experiment, entries)):
        sides = ["left", *["right"] * panel.shape[1]]
        markdown += [f"## {heading}", panel.to_markdown(disable_numparse=True, colalign=sides)]
        text = panel.reset_index().to_latex(
            index=False,
            escape=True,
            column_format="".join(side[0] for side in sides),
            caption=LATEX.sub(r"\\\g<0>", f"{experiment.title}. {heading}. {' '.join(notes)}").replace("^", r"\^{}"),
            label=f"tab:{experiment.name}{number or ''}",
        )
        latex.append(re.sub(BOLD, r"\\textbf{\1}", text))
    markdown.append("\n".join(f"- {note}" for note in notes))
    text = "\n\n".join(markdown).strip() + "\n"
    contents = {"csv": pd.DataFrame(entries).to_csv(index=False), "md": text, "tex": "\n".join(latex)}
    for suffix, content in contents.items():
        with replacing(folder / f"{experiment.name}.{suffix}") as path:
            path.write_text(content, encoding="utf-8")


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


def properties_of(experiment: Experiment, rows: Iterable[str]) -> dict[str, list[str]]:
    """Read the properties of each row's estimator that the table shows."""
    words: dict[Any, str] = {True: "yes", False: "no"}
    found = {}
    for row, overrides in experiment.rows.items() if experiment.properties else ():
        names = [override.removeprefix("estimator=") for override in overrides if override.startswith("estimator=")]
        if names and (target := read_file("estimator", names[-1])["_target_"]):
            found[row] = hydra.utils.get_class(target)
    return {
        title: [words.get(getattr(found.get(row), name, None), "") for row in rows]
        for name, title in experiment.properties.items()
    }


def panels_of(experiment: Experiment, entries: Collection[Entry]) -> list[tuple[str, pd.DataFrame]]:
    """Arrange values as tables of at most `MOST_COLUMNS` columns, with headings; the best of a column is in bold.

    A table is about one metric, and one network where there are many columns; or about several metrics, if there is but
    one column. The paper's values follow ours if there is room; otherwise they have a table of their own. A ranking is
    sorted by the mean of its columns. Errors that are alike are in `notes_on`.
    """
    at, rows, columns = arranged(experiment, entries)
    metrics, ranked = shown_metrics(experiment), experiment.ranked_by
    units = {each: unit_of(experiment, *each, at.values()) for each in product(metrics, SOURCES)}
    left_out: dict[str, dict[str, Any]] = {metric: dict.fromkeys(in_caption(entries, metric)) for metric in metrics}

    def texts(column: str, metric: str, source: str) -> list[str]:
        found = [at.get((row, column, metric)) for row in rows]
        own = [entry for entry in found if metric == ranked and entry and is_method(experiment, entry.row)]
        values = pd.Series([getattr(entry, source) for entry in own], dtype=float)
        best = values.agg(best_of(metric)) if values.count() > 1 and source != "difference" else None
        shown = [entry and replace(entry, **left_out[metric]) for entry in found]
        return [
            f"**{text.removesuffix(LEVEL)}**" if entry in own and getattr(entry, source) == best is not None else text
            for entry, text in zip(
                found, (as_text(each, source, units[metric, source][1]) for each in shown), strict=True
            )
        ]

    groups: list[tuple[str, str, dict[str, tuple[str, str]]]]
    if len(columns) == 1:
        places = [(columns[0], metric) for metric in metrics]
        groups = [(columns[0], source, {units[place[1], source][0]: place for place in places}) for source in SOURCES]
    else:
        groups = [
            (f"{network}{units[metric, source][0]}", source, {title: (column, metric) for title, column in own.items()})
            for metric, (network, own), source in product(metrics, by_network(columns).items(), SOURCES)
        ]
    panels: list[tuple[str, dict[str, list[str]]]] = []
    for heading, source, own in groups:
        found = {title: column for title, place in own.items() if any(column := texts(*place, source))}
        if panels and panels[-1][0] == heading and len(panels[-1][1]) + len(found) < MOST_COLUMNS:
            panels[-1][1].update({f"{title} ({source})": column for title, column in found.items()})
        elif found:
            properties = {} if panels else properties_of(experiment, rows)
            panels.append((heading if source == "ours" else f"{heading} ({source})", properties | found))
    return list(within_width(experiment, rows, panels))


def arranged(
    experiment: Experiment, entries: Iterable[Entry]
) -> tuple[dict[tuple[str, str, str], Entry], list[str], list[str]]:
    """Return entries by place, and rows and columns in order; a ranking is sorted by its means, the last column."""
    at, columns, ranked = dict[tuple[str, str, str], Entry](), [*experiment.columns], experiment.ranked_by
    for entry in entries:
        if entry.row in experiment.rows:
            at[entry.row, entry.column, entry.metric] = entry
        elif entry.paper is not None:  # one of the paper's devices
            row = f"{entry.row} (paper)"
            at[row, entry.column, entry.metric] = replace(entry, row=row, ours=entry.paper, paper=None)
    rows = list(dict.fromkeys([*experiment.rows, *(row for row, _, _ in at)]))
    if experiment.figure == "ranking":
        for row in rows:
            values = [value for column in columns if (value := at[row, column, ranked].ours) is not None]
            ours = mean(values) if len(values) == len(columns) else None
            at[row, MEAN, ranked] = Entry(row, MEAN, ranked, ours, None, None, "done")
        rows.sort(key=lambda row: -(at[row, MEAN, ranked].ours or 0))
        columns.append(MEAN)
    return at, rows, columns


def within_width(
    experiment: Experiment, rows: list[str], panels: Iterable[tuple[str, dict[str, list[str]]]]
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield tables of at most `MOST_COLUMNS` columns: turned if they have few rows, otherwise divided."""
    for heading, found in panels:
        names = rows if heading.endswith("(paper)") else [experiment.row_titles.get(row, row) for row in rows]
        frame = pd.DataFrame(found, pd.Index(names, name=experiment.axis_title or "Method"))
        frame = frame[~frame.isin(["", "n.a."]).all(axis=1)]
        if len(frame) < MOST_COLUMNS <= len(found):
            frame = frame.T.rename_axis("Network")
        width = ceil(frame.shape[1] / ceil(frame.shape[1] / (MOST_COLUMNS - 1)))
        yield from ((heading, frame.iloc[:, start : start + width]) for start in range(0, frame.shape[1], width))


def shown_metrics(experiment: Experiment) -> list[str]:
    return experiment.shown or ([*experiment.metrics] if len(experiment.columns) == 1 else [experiment.ranked_by])


def by_network(columns: list[str]) -> dict[str, dict[str, str]]:
    """Group many columns called `NETWORK, ...` by network, by what follows its name; others stay together."""
    if len(columns) <= MOST_TOGETHER or not all(", " in column for column in columns):
        return {"": {column: column for column in columns}}
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for column in columns:
        network, comma, rest = column.partition(", ")
        groups[network + comma][rest] = column
    return groups


def unit_of(experiment: Experiment, metric: str, source: str, entries: Iterable[Entry]) -> tuple[str, int]:
    """Choose a metric's title and the factor of its values: MFLOPs or seconds if most are below a GFLOP or a minute."""
    values = numbers_of(entries, metric, "ours" if source == "difference" else source)
    title = experiment.metrics[metric]
    for name, (large, small, factor) in SMALLER.items():
        if name in metric and values and median(values) < 1:
            return title.replace(large, small), factor
    return title, 1


def is_method(experiment: Experiment, row: str) -> bool:
    """Whether a row is a method's that may be the best: not the original's, a device's, or unranked."""
    return row in experiment.rows and row not in experiment.unranked and not is_dense(experiment.rows[row])


def best_of(metric: str) -> str:
    return "min" if metric.endswith(LESS_IS_BETTER) else "max"


def numbers_of(entries: Iterable[Entry], metric: str, field: str) -> list[float]:
    return [value for entry in entries if entry.metric == metric and (value := getattr(entry, field)) is not None]


def in_caption(entries: Iterable[Entry], metric: str) -> list[str]:
    """Name the kinds of a metric's errors that are so much alike that the caption has them, and not cells."""
    errors, deviations = (numbers_of(entries, metric, kind) for kind in ("standard_error", "deviation"))
    if not errors or max(errors) > MOST_ALIKE * min(errors):
        return []
    return ["standard_error", *["deviation"] * bool(max(deviations, default=0.0) <= max(errors))]


def notes_on(experiment: Experiment, entries: Collection[Entry]) -> list[str]:
    """Say what errors and marks mean, and how large errors are that are alike."""
    notes, sizes = [], []
    for metric in shown_metrics(experiment):
        errors, deviations = (numbers_of(entries, metric, kind) for kind in ("standard_error", "deviation"))
        alike, title = in_caption(entries, metric), experiment.metrics[metric]
        span = " to ".join(dict.fromkeys(f"{each(errors):.2g}" for each in (min, max) if errors))
        notes += [ALIKE.format(title, span) if alike else ERRORS] * bool(errors)
        if deviations:
            sizes.append(f"of at most {max(deviations):.2g}" if "deviation" in alike else "in brackets")
    notes += [MARKS] * any(entry.behind is not None for entry in entries)
    notes += [DEVIATIONS.format(experiment.seeds, " or ".join(dict.fromkeys(sizes)))] * bool(sizes)
    return list(dict.fromkeys(notes))


def leads_in(experiment: Experiment, entries: Iterable[Entry], source: str = "ours") -> tuple[pd.Series, int, bool]:
    """Count in how many columns each method is the best, or level with it, those in most first, then by their means.

    Also returns the number of columns, and whether all errors are unknown. The paper's values have none.
    """
    ranked, which = experiment.ranked_by, best_of(experiment.ranked_by)
    own = pd.DataFrame(
        [
            (entry.row, entry.column, value, entry.behind if source == "ours" else None)
            for entry in entries
            if entry.metric == ranked and is_method(experiment, entry.row)
            if (value := getattr(entry, source)) is not None
        ],
        columns=["row", "column", "value", "behind"],
    )
    best = own.value == own.groupby("column").value.transform(which)
    counts = (best | (own.behind.astype(float) <= ERRORS_APART)).groupby(own.row).sum()
    means = own.groupby("row").value.mean()
    order = pd.DataFrame({"count": counts, "mean": means if which == "max" else -means})
    order = order.sort_values(["count", "mean"], ascending=False)
    return counts[order.index].rename(index=experiment.row_titles), own.column.nunique(), bool(own.behind.isna().all())


def leaders_of(experiment: Experiment, entries: Iterable[Entry], source: str = "ours") -> str:
    """Name the methods that are best, or level with the best, in most columns; empty without two to compare."""
    counts, num_columns, untested = leads_in(experiment, entries, source)
    if len(counts) < 2:
        return ""
    names = [*counts.index[counts == counts.max()]]
    text = "; ".join(names) if len(names) <= MOST_NAMED + 1 else f"{len(names)} of {len(counts)}"
    text = f"all {len(counts)}" if len(names) == len(counts) else text
    where = [f"{counts.max()} of {num_columns} columns"] * bool(counts.max() < num_columns)
    remarks = ", ".join([*where, *["not tested"] * (untested and source == "ours")])
    return f"{text} ({remarks})" if remarks else text


def finding_of(experiment: Experiment, entries: Iterable[Entry]) -> str:
    """Say which method, or which value of a setting, is best, or level with the best, in most columns, and the next.

    Empty without two to compare.
    """
    counts, num_columns, untested = leads_in(experiment, entries)
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
    if untested:
        return f"{name} has the best value{where * (num_columns > 1)}, but its lead is not tested"
    together = [other for other in others if counts[other] == most]
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


def screen_tables(experiment: Experiment, entries: Collection[Entry]) -> Iterator[Table]:
    """Make the tables for a terminal, without errors where they need too many characters."""
    for heading, panel in panels_of(experiment, entries):
        table = Table(title=escape(heading), title_justify="left")
        table.add_column(escape(panel.index.name))
        for head in panel:
            lines = fill(head, CHARACTERS_OF_HEAD, break_long_words=False, break_on_hyphens=False)
            table.add_column(escape(lines), justify="right", no_wrap=True)
        for row, *texts in panel.itertuples():
            if panel.shape[1] > MOST_TOGETHER:
                texts = [re.sub(r" ±[^*]*", "", text) for text in texts]
            table.add_row(escape(row), *(re.sub(BOLD, r"[bold]\1[/]", escape(text)) for text in texts))
        yield table


def as_text(entry: Entry | None, source: str = "ours", factor: int = 1) -> str:
    """Write a value: ours with its errors, or the status of an unfinished cell."""
    value = getattr(entry, source, None)
    text = "" if entry is None or value is None else number(factor * value, entry.metric)
    if entry is None or source != "ours":
        return text
    if entry.status != "done":
        return entry.status
    error = entry.standard_error
    if error is not None:
        text += f" ± {error:.1g}" if 0 < error < LEAST_ERROR else f" ± {error:.1f}"
    deviation = factor * (entry.deviation or 0)
    if deviation >= LEAST_DEVIATION:
        text += f" ({deviation:.1f})"
    elif error is not None and deviation > error:
        text += f" ({deviation:.1g})"
    return text + LEVEL * is_level(entry)


def is_level(entry: Entry) -> bool:
    """Whether a value is its column's best, or not apart from it."""
    return entry.behind is not None and entry.behind <= ERRORS_APART


def number(value: float, metric: str = "") -> str:
    if metric.endswith("speedup"):
        return f"{value:.2f}"  # many are close to 1
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"
