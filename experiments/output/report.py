"""The report on a results folder: `report.html`, a single file that loads nothing, and the short `report.md`.

It shows the measurements, their provenance, and why the others are missing.
"""

import copy
import io
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape
from PIL import Image

from experiments.compose import is_ours
from experiments.config import Experiment
from experiments.output.entries import Entry, entries_of, read_entries
from experiments.output.findings import leaders_of
from experiments.output.tables import BOLD, MARKS, notes_on, panels_of
from experiments.record import Record, published_records, read_record
from facts.parts import results_of
from facts.utils.files import replacing

HEADINGS = "Your own", "Tables of the paper", "Further tables", "Figures", "Ablations"
FIRST = "steps", "trade_off", "ranking"  # kinds of figures whose findings come first
FOLDED = HEADINGS[2], HEADINGS[4]  # until a reader opens them, beside tables of the paper
UNLIKE = "The networks and data are not the paper's: compare how methods rank."
LEADERS = (
    "Lists of tables name the methods that are best, or within two standard errors of the best, in every column, or "
    "else in most. Means are over columns. Without outcomes of single samples, leads are not tested. Which of the "
    "paper's claims hold: docs/results.md."
)
TERMS = (
    "FACTS is the paper's estimator; CoRS, its search, measures each layer's loss, and our CoRS-Fisher predicts it. "
    "Units are attention heads and MLP hidden units, made narrower; tokens are patches, merged."
)
STAND_INS = {"mini": "; small stand-ins"}  # in titles of a profile, since tables and figures travel alone
TITLES = {"mini": "The paper's tables on small networks", "photos": "Two published networks on photos"}
ABOUT = {  # a folder, by its profile
    "mini": f"Small networks have up to a million parameters. {UNLIKE}",
    "photos": "A DeiT-Tiny and a ViT-Tiny as published, calibrated on ImageNet photos and not trained. Unless a table "
    "says otherwise, values are of the test half, 325 validation photos; defaults were tuned on 325 others.",
}


@dataclass(frozen=True)
class Result:
    """One experiment. `entries` are by row, column and metric; existing `records` by row and column, of the first draw.

    `draws` holds these and the records of all other draws. `message` is what the figure says that it shows, `outdated`
    which rows are of earlier code.
    """

    experiment: Experiment
    entries: dict[tuple[str, str, str], Entry]
    records: dict[tuple[str, str], Record]
    draws: list[Record]
    figure: Path | None
    message: str
    outdated: str

    @property
    def cells(self) -> list[Entry]:
        """The ranked metric of each cell, with its status; empty if there is no table."""
        experiment, metric = self.experiment, self.experiment.ranked_by
        places = product(experiment.rows, experiment.columns) if experiment.metrics else ()
        return [self.entries[*place, metric] for place in places]

    @property
    def has_begun(self) -> bool:
        return bool(self.figure or self.records or any(entry.ours is not None for entry in self.entries.values()))


def write_report(experiments: Iterable[Experiment], folder: Path) -> None:
    """Write both files to `folder`."""
    results = [read_result(experiment, folder) for experiment in experiments]
    loader, escaping = PackageLoader("experiments.output"), select_autoescape()
    environment = Environment(
        loader=loader, autoescape=escaping, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    for function in (gaps_of, leaders_of, notes_on, panels_of, parts, picture, provenance):
        environment.globals[function.__name__] = function
    environment.globals |= {"LEADERS": LEADERS, "MARKS": MARKS, "TERMS": TERMS}
    environment.filters |= {"code": code, "marked": marked_up, "metric": metric_title}
    distinct = {record.fingerprint: record for result in results for record in result.records.values()}
    draws = {record.fingerprint: record for result in results for record in result.draws}
    compared = any(entry.difference is not None for result in results for entry in result.entries.values())
    told = [result for result in results if result.message and result.experiment.figure != "ablation"]
    content = {
        "told": sorted(told, key=lambda result: result.experiment.figure not in FIRST),
        "title": TITLES.get(folder.name, f"Results, profile {folder.name}"),
        "stand_ins": STAND_INS.get(folder.name, ""),
        "about": ABOUT.get(folder.name, "" if compared else UNLIKE),
        "folded": FOLDED if HEADINGS[1] in parts(results) else (),
        "results": results,
        "records": distinct,
        "draws": sorted(draws.values(), key=lambda record: record.time),
        "compared": compared,
        "waiting": ", ".join(result.experiment.name for result in results if not result.has_begun),
    }
    for name in ("report.md", "report.html"):
        page = environment.get_template(name).render(content)
        with replacing(folder / name) as path:
            path.write_text(page, encoding="utf-8")


def parts(results: list[Result]) -> dict[str, list[Result]]:
    """Group the experiments that have run under headings, a user's own first, then the paper's tables."""
    chosen: dict[str, list[Result]] = {heading: [] for heading in HEADINGS}
    for result in results:
        if result.has_begun:
            chosen[heading_of(result)].append(result)
    further = HEADINGS[2] if chosen[HEADINGS[1]] else "Tables"
    return {further if heading == HEADINGS[2] else heading: members for heading, members in chosen.items() if members}


def heading_of(result: Result) -> str:
    own, paper, beyond, figures, ablations = HEADINGS
    if not is_ours(result.experiment.name):
        return own
    if not result.experiment.metrics:
        return figures
    if result.experiment.figure == "ablation":
        return ablations
    return paper if any(entry.paper is not None for entry in result.entries.values()) else beyond


def marked_up(text: str) -> Markup:
    """Link the status of an unfinished cell to the reasons, and show the best in bold."""
    if text in ("failed", "missing", "n.a."):
        return Markup('<a class="{0}" href="#missing">{0}</a>').format(text)
    return Markup(re.sub(BOLD, r"<b>\1</b>", str(escape(text))))


def picture(path: Path) -> str:
    """Encode a PNG in a URL, as lossless WebP: a third of the bytes."""
    file = io.BytesIO()
    Image.open(path).save(file, "WEBP", lossless=True)
    return f"data:image/webp;base64,{b64encode(file.getvalue()).decode()}"


def message_of(path: Path) -> str:
    """Read what a figure shows from the title that its PNG carries."""
    with Image.open(path) as image:
        return image.info.get("Title", "")


def code(text: str) -> Markup:
    """Mark up text between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def metric_title(title: str) -> Markup:
    """Mark up `^` and `_` as in TeX: mAP^b_50."""
    raised = re.sub(r"\^(\w)", r"<sup>\1</sup>", str(escape(title)))
    return Markup(re.sub(r"_(\w+)", r"<sub>\1</sub>", raised))


def read_result(experiment: Experiment, folder: Path) -> Result:
    """Read an experiment's table and records, using published ones where a cell did not run here."""
    written = read_entries(folder / "tables" / f"{experiment.name}.csv")
    left_out = {(row, column) for row, columns in experiment.not_applicable.items() for column in columns}
    written = [entry for entry in written if entry.status != "n.a." or (entry.row, entry.column) in left_out]
    every = [*entries_of(experiment, [], comparable=False), *written]
    entries = {(entry.row, entry.column, entry.metric): entry for entry in every}
    published = {record.fingerprint: record for record in published_records(experiment.name, folder)}
    names = {(entry.row, entry.column): entry.fingerprint for entry in entries.values() if entry.fingerprint}
    found = {place: read_record(name, folder / "records") or published.get(name) for place, name in names.items()}
    records = {place: record for place, record in found.items() if record}
    draws = published | {record.fingerprint: record for record in records.values()}
    figure = folder / "figures" / f"{experiment.name}.png"
    old = {row for (row, _), record in records.items() if is_outdated(record)}
    titles = [experiment.row_titles.get(row, row) for row in experiment.rows if row in old]
    which = "all" if len(titles) == len(experiment.rows) else "; ".join(titles)
    if which:
        experiment = copy.deepcopy(experiment)
        experiment.notes = [*experiment.notes, f"Measured before the code changed: {which}."]
    shown, message = (figure, message_of(figure)) if figure.exists() else (None, "")
    return Result(experiment, entries, records, [*draws.values()], shown, message, which)


def gaps_of(results: Iterable[Result]) -> pd.DataFrame:
    """List the cells that are not done and the figures that are missing of what has begun, by experiment and reason."""
    lines = []
    for result in results:
        if not result.has_begun:
            continue
        name, missing = result.experiment.name, [cell for cell in result.cells if cell.status != "done"]
        if result.experiment.figure and result.figure is None:
            missing.append(Entry("figure", "", "", None, None, None, "missing"))
        lines += [
            (name, cell.status, _reason(result, cell), f"{cell.row}, {cell.column}".strip(", ")) for cell in missing
        ]
    table = pd.DataFrame(lines, columns=["experiment", "state", "why", "cells"])
    return table.groupby(["experiment", "state", "why"], sort=False).agg("; ".join).reset_index(["state", "why"])


def _reason(result: Result, cell: Entry) -> str:
    if cell.status == "n.a.":
        return result.experiment.not_applicable[cell.row][cell.column]
    if cell.status == "missing":
        return f"not run yet: python -m experiments.reproduce experiment={result.experiment.name}"
    record = result.records.get((cell.row, cell.column))
    return record.error.strip().splitlines()[-1] if record and record.error else "no record: run it again to see why"


def is_outdated(record: Record) -> bool:
    """Whether a change of what is computed has made a record's numbers those of earlier code."""
    return record.identity.get("results") != results_of(record.config.get("parts", "layers"))


def provenance(records: list[Record]) -> pd.DataFrame:
    """Describe all records, the latest last: their commits, machines and versions, with counts where they differ."""

    def counted(values: Iterable[str]) -> str:
        numbers = Counter(values).most_common()
        return ", ".join(f"{value} ({number})" if len(numbers) > 1 else value for value, number in numbers)

    states = (record.git for record in records)
    commits = (f"{git.get('sha', 'unknown')[:12]}{' changed' if git.get('dirty') else ''}" for git in states)
    outdated = f"{sum(map(is_outdated, records))} of {len(records)} records"
    places = [{**record.machine, **record.versions} for record in records]
    known = {"latest": records[-1].time, "measured before the code changed": outdated, "commits": counted(commits)}
    known |= {name: counted(place[name] for place in places if name in place) for name in places[-1]}
    return pd.DataFrame({"value": known}).rename_axis("what")
