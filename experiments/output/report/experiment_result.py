"""Results of an experiment in a folder: metrics, records, and reasons for the missing ones."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.config import Experiment
from experiments.extras import OF_TASKS, how_to_install, missing_packages
from experiments.grid import Status
from experiments.output.tables import PAIRS_APART, RANK_CORRELATION, Entry, notes_of
from experiments.paper import paper_values
from experiments.record import Record, published_records, read_record

NUMBERS = ("ours", "paper", "difference", "standard_error", "behind", "count", "p_value")

Properties = dict[str, dict[str, str]]
"""Properties of each row's estimator in a table, by row and title."""


@dataclass(frozen=True)
class Gap:
    """Cells without metrics for the same reason."""

    status: str
    reason: str
    cells: list[str]


@dataclass(frozen=True)
class ExperimentResult:
    """One experiment. `entries` are by row, column and metric; `records`, those that exist, by row and column."""

    experiment: Experiment
    properties: Properties
    entries: dict[tuple[str, str, str], Entry]
    records: dict[tuple[str, str], Record]
    figure: Path | None

    @property
    def cells(self) -> dict[tuple[str, str], Entry]:
        """The ranked metric of each cell, with its status; empty if there is no table."""
        metric, experiment = self.experiment.ranked_by, self.experiment
        places = [(row, column) for row in experiment.rows for column in experiment.columns] if metric else []
        return {place: self.entries[*place, metric] for place in places}

    @property
    def agreement(self) -> dict[str, Entry]:
        """Spearman's correlation of our ranking of the methods with the published one, by column."""
        return self._extra(RANK_CORRELATION)

    @property
    def pairs_apart(self) -> dict[str, Entry]:
        """The number of pairs of methods more than two standard errors apart, by column."""
        return self._extra(PAIRS_APART)

    def _extra(self, row: str) -> dict[str, Entry]:
        return {entry.column: entry for entry in self.entries.values() if entry.row == row and entry.ours is not None}

    @property
    def summary(self) -> dict[str, dict[str, Entry]]:
        """The lines below the methods, by heading and column."""
        rows = {"Ranking agreement": self.agreement, "Pairs apart": self.pairs_apart}
        return {heading: entries for heading, entries in rows.items() if entries}

    @property
    def notes(self) -> list[str]:
        return notes_of(self.experiment, self.entries.values())

    @property
    def compared(self) -> bool:
        return any(entry.difference is not None for entry in self.entries.values())

    @property
    def gaps(self) -> list[Gap]:
        """Cells that are not done, grouped by reason, and the figure if it is missing."""
        cells: dict[tuple[str, str], list[str]] = {}
        for (row, column), entry in self.cells.items():
            if entry.status != "done":
                cells.setdefault((entry.status, self._reason(entry)), []).append(f"{row}, {column}")
        if self.experiment.figure and self.figure is None:
            cells.setdefault(("missing", self._what_to_do()), []).append("the figure")
        return [Gap(status, reason, places) for (status, reason), places in cells.items()]

    def _reason(self, entry: Entry) -> str:
        if entry.status == "n.a.":
            return self.experiment.not_applicable[entry.row][entry.column]
        if entry.status == "missing":
            return self._what_to_do()
        record = self.records.get((entry.row, entry.column))
        if record and record.error:
            return record.error.strip().splitlines()[-1]
        return "its record is not here: run it again to see why"

    def _what_to_do(self) -> str:
        extra = OF_TASKS.get(self.experiment.task)
        if extra and (packages := missing_packages(extra)):
            return f"{', '.join(packages)} not installed: `{how_to_install(extra)}`"
        return f"not run yet: `python -m experiments.reproduce experiment={self.experiment.name}`"


def read_result(experiment: Experiment, properties: Properties, folder: Path) -> ExperimentResult:
    """Read the experiment's table and records, those beside the table where a cell did not run here.

    Cells that the table lacks are missing, or left out on purpose.
    """
    entries = _read_table(folder / "tables" / f"{experiment.name}.csv")
    for row in experiment.rows:
        for column in experiment.columns:
            status: Status = "n.a." if column in experiment.not_applicable.get(row, {}) else "missing"
            for metric in experiment.metrics:
                paper = paper_values(experiment.name).get((row, column, metric))
                entry = Entry(row, column, metric, None, paper, None, status, "")
                entries.setdefault((row, column, metric), entry)
    figure = folder / "figures" / f"{experiment.name}.png"
    fingerprints = {(row, column): entry.fingerprint for (row, column, _), entry in entries.items()}
    published = {record.fingerprint: record for record in published_records(experiment.name, folder)}
    records = {
        place: read_record(name, folder / "records") or published.get(name)
        for place, name in fingerprints.items()
        if name
    }
    return ExperimentResult(
        experiment,
        properties,
        entries,
        {place: record for place, record in records.items() if record},
        figure if figure.exists() else None,
    )


def distinct(results: list[ExperimentResult]) -> list[Record]:
    """Every record once: tables share cells."""
    return list({record.fingerprint: record for result in results for record in result.records.values()}.values())


def _read_table(path: Path) -> dict[tuple[str, str, str], Entry]:
    if not path.exists():
        return {}
    numbers = {name: [""] for name in NUMBERS}  # all else is text, a row called "None" too
    types = {**dict.fromkeys(Entry.__annotations__.keys() - numbers, str), "count": "Int64"}
    table = pd.read_csv(path, dtype=types, na_values=numbers, keep_default_na=False)
    table = table.astype(object).where(table.notna(), None)
    return {(line["row"], line["column"], line["metric"]): Entry(**line) for line in table.to_dict("records")}
