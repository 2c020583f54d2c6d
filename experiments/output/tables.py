"""Tables of an experiment: one long CSV of everything, and tables to be read at a glance, in Markdown and LaTeX."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path
from statistics import mean, median
from textwrap import fill
from typing import Any

import hydra
import pandas as pd
from rich.markup import escape
from rich.table import Table

from experiments.compose import read_file
from experiments.config import Experiment
from experiments.output.entries import Entry, best_of, is_level, is_method, number, numbers_of
from experiments.output.findings import leaders_of
from facts.utils.files import replacing

SOURCES = "ours", "paper", "difference"
LEVEL = "*"  # marks methods that are not apart from the best of a column
ERRORS = "± is one standard error."
ALIKE = "Standard errors of {} are {}{}."
PAIRED = "; of differences on the same images, mostly less"
MARKS = (
    f"Bold is the best method of a column, or reads the same; {LEVEL} marks those within two standard errors of it, "
    "by images or, if larger, by draws (Student's t), not corrected for the number of methods. Pairs are compared "
    "image by image, so a lower value can have a mark that a higher one lacks."
)
DEVIATIONS = (
    "Where values differ between {} draws of the calibration sample, the search sample and sampled labels, they are "
    "means, with standard deviations {}. A mark can then mean that draws vary too much to tell."
)
LATEX = re.compile("[&%$#_{}]")  # what a caption has to escape
BOLD = r"\*\*(.+?)\*\*"
MOST_ALIKE = 3  # times the smallest error: then the caption has all of them
LEAST_ERROR = 0.1  # of a share: others have more digits
LEAST_DEVIATION = 0.05  # over draws: less would be shown as 0.0, and is if it exceeds the error
MEAN = "mean"  # of a ranking's columns
MOST_COLUMNS = 7  # of a table that is read at a glance, with that of the rows' names
MOST_TOGETHER = 4  # columns of several networks in one table
SCREEN = 80  # characters of a terminal
CHARACTERS_OF_HEAD = 8  # per line, in a terminal
SMALLER = {"gflops": ("GFLOPs", "MFLOPs", 1000), "minutes": ("[min]", "[s]", 60)}  # units, by parts of metrics' names


def write_tables(experiment: Experiment, entries: list[Entry], folder: Path) -> None:
    """Write `<name>.csv`, `<name>.md` and `<name>.tex`."""
    notes, latex, (best, _) = [*experiment.notes, *notes_on(experiment, entries)], [], leaders_of(experiment, entries)
    markdown = [f"# {experiment.title}", *[f"**Best, or level with the best: {best}.**"] * bool(best)]
    for place, (heading, panel) in enumerate(panels_of(experiment, entries)):
        sides = ["left", *["right"] * panel.shape[1]]
        markdown += [f"## {heading}", panel.to_markdown(disable_numparse=True, colalign=sides)]
        text = panel.reset_index().to_latex(
            index=False,
            escape=True,
            column_format="".join(side[0] for side in sides),
            caption=LATEX.sub(r"\\\g<0>", f"{experiment.title}. {heading}. {' '.join(notes)}").replace("^", r"\^{}"),
            label=f"tab:{experiment.name}{place or ''}",
        )
        latex.append(re.sub(BOLD, r"\\textbf{\1}", text))
    markdown.append("\n".join(f"- {note}" for note in notes))
    text = "\n\n".join(markdown).strip() + "\n"
    contents = {"csv": pd.DataFrame(entries).to_csv(index=False), "md": text, "tex": "\n".join(latex)}
    for suffix, content in contents.items():
        with replacing(folder / f"{experiment.name}.{suffix}") as path:
            path.write_text(content, encoding="utf-8")


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
        best = number(values.agg(best_of(metric)), metric) if values.count() > 1 and source != "difference" else None
        shown = [entry and replace(entry, **left_out[metric]) for entry in found]
        texts = [as_text(each, source, units[metric, source][1]) for each in shown]
        return [
            f"**{text.removesuffix(LEVEL)}**" if entry in own and is_shown_as(best, entry, source) else text
            for entry, text in zip(found, texts, strict=True)
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
    """Yield tables of at most `MOST_COLUMNS` columns: turned if they have few rows, otherwise divided.

    Rows and networks have the profile's names, except for the paper's values.
    """
    for heading, found in panels:
        frame = pd.DataFrame(found, pd.Index(rows, name=experiment.axis_title or "Method"))
        if not heading.endswith("(paper)"):
            frame = frame.rename(index=experiment.row_titles, columns=experiment.column_titles)
            heading = in_profile(experiment, heading)
        frame = frame[~frame.isin(["", "n.a."]).all(axis=1)]
        if len(frame) < MOST_COLUMNS <= len(found):
            frame = frame.T.rename_axis("Network")
        width = ceil(frame.shape[1] / ceil(frame.shape[1] / (MOST_COLUMNS - 1)))
        yield from ((heading, frame.iloc[:, start : start + width]) for start in range(0, frame.shape[1], width))


def in_profile(experiment: Experiment, heading: str) -> str:
    """Name a column, or the network that a heading begins with, as in the profile."""
    titles, (network, *others) = experiment.column_titles, heading.split(", ", 1)
    return titles.get(heading) or ", ".join([titles.get(network, network), *others])


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
        tested = any(entry.behind is not None for entry in entries if entry.metric == metric)
        paired = PAIRED * (tested and not deviations)
        notes += [ALIKE.format(title, span, paired) if alike else ERRORS] * bool(errors)
        if deviations:
            sizes.append(f"of at most {max(deviations):.2g}" if "deviation" in alike else "in brackets")
    notes += [MARKS] * any(entry.behind is not None for entry in entries)
    notes += [DEVIATIONS.format(experiment.seeds, " or ".join(dict.fromkeys(sizes)))] * bool(sizes)
    return list(dict.fromkeys(notes))


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


def is_shown_as(best: str | None, entry: Entry | None, source: str) -> bool:
    """Whether a value reads as the best one does."""
    value = getattr(entry, source, None)
    return entry is not None and value is not None and number(value, entry.metric) == best
