"""Results of an experiment in a folder: values, records, and reasons for the missing ones."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd

from experiments.config import Experiment
from experiments.grid import Status
from experiments.output.tables import Entry, Properties, read_entries
from experiments.paper import paper_values
from experiments.record import Record, published_records, read_record
from facts.utils.version import RESULTS


@dataclass(frozen=True)
class Result:
    """One experiment. `entries` are by row, column and metric; existing `records` by row and column."""

    experiment: Experiment
    properties: Properties
    entries: dict[tuple[str, str, str], Entry]
    records: dict[tuple[str, str], Record]
    figure: Path | None

    @property
    def cells(self) -> list[Entry]:
        """The ranked metric of each cell, with its status; empty if there is no table."""
        experiment, metric = self.experiment, self.experiment.ranked_by
        places = product(experiment.rows, experiment.columns) if experiment.metrics else ()
        return [self.entries[*place, metric] for place in places]


def read_result(experiment: Experiment, properties: Properties, folder: Path) -> Result:
    """Read an experiment's table and records, using published ones where a cell did not run here."""
    entries, paper = {}, paper_values(experiment.name)
    for row, column, metric in product(experiment.rows, experiment.columns, experiment.metrics):
        status: Status = "n.a." if column in experiment.not_applicable.get(row, {}) else "missing"
        theirs = paper.get((row, column, metric))
        entries[row, column, metric] = Entry(row, column, metric, None, theirs, None, status)
    for entry in read_entries(folder / "tables" / f"{experiment.name}.csv"):
        entries[entry.row, entry.column, entry.metric] = entry
    published = {record.fingerprint: record for record in published_records(experiment.name, folder)}
    names = {(entry.row, entry.column): entry.fingerprint for entry in entries.values() if entry.fingerprint}
    found = {place: read_record(name, folder / "records") or published.get(name) for place, name in names.items()}
    records = {place: record for place, record in found.items() if record}
    figure = folder / "figures" / f"{experiment.name}.png"
    return Result(experiment, properties, entries, records, figure if figure.exists() else None)


def read_page(path: Path) -> tuple[str, pd.DataFrame, list[str]]:
    """Read a Markdown page: its title, its table as written, and the text around it."""
    title, *lines = filter(None, path.read_text().splitlines())
    heads, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[0] == "|"]
    texts = [line.removeprefix("- ") for line in lines if line[0] != "|"]
    return title.removeprefix("# "), pd.DataFrame(cells, columns=heads).set_index(heads[0]), texts


def gaps_of(results: Iterable[Result]) -> pd.DataFrame:
    """List the cells that are not done and the figures that are missing, by experiment, state and reason."""
    lines = []
    for result in results:
        missing = [cell for cell in result.cells if cell.status != "done"]
        if result.experiment.figure and result.figure is None:
            missing.append(Entry("figure", "", "", None, None, None, "missing"))
        name = result.experiment.name
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
    return record.identity.get("results") != RESULTS


def provenance(records: list[Record]) -> pd.DataFrame:
    """Describe the latest record's machine and versions, and the commits of all records."""
    states = (record.git for record in records)
    commits = {f"{git.get('sha', 'unknown')[:12]}{' (changed)' if git.get('dirty') else ''}" for git in states}
    outdated = f"{sum(map(is_outdated, records))} of {len(records)} records"
    known = {"last cell": records[-1].time, "outdated": outdated, "commits": ", ".join(sorted(commits))}
    return pd.DataFrame({"value": {**known, **records[-1].machine, **records[-1].versions}}).rename_axis("what")


def timings(results: Iterable[Result]) -> pd.DataFrame:
    """Sum cells, repaired factors and seconds by stage over each estimator; no cell counts twice."""
    lines = {}
    for result in results:
        for record in result.records.values():
            estimator = (record.config["estimator"]["_target_"] or "none").rpartition(".")[2]
            seconds = {f"{stage} [s]": seconds for stage, seconds in record.seconds.items()}
            repaired = {"estimator": estimator, "cells": 1, "repaired": record.num_repaired}
            lines[record.fingerprint] = {**repaired, **seconds}
    return pd.DataFrame(lines.values()).groupby("estimator").sum()
