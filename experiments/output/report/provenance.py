"""Provenance of the cells: machine, versions, commits, and seconds."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.output.report.experiment_result import ExperimentResult
from experiments.record import Record


@dataclass(frozen=True)
class Provenance:
    """Time, machine and versions of the last cell, and the commits of all cells."""

    time: str
    commits: list[str]
    machine: dict[str, str]
    versions: dict[str, str]

    @classmethod
    def of(cls, records: list[Record]) -> "Provenance":
        latest = max(records, key=lambda record: record.time)
        commits = {f"{r.git.get('sha', 'unknown')[:12]}{' (changed)' if r.git.get('dirty') else ''}" for r in records}
        return cls(latest.time, sorted(commits), latest.machine, latest.versions)


def seconds_by_estimator(records: Iterable[Record]) -> pd.DataFrame:
    """One line an estimator: how many cells, seconds by stage, repaired factors."""
    named = {record.fingerprint: (record.config["estimator"]["_target_"] or "none") for record in records}
    return _sums("estimator", ((named[record.fingerprint].rpartition(".")[2], record) for record in records))


def seconds_by_experiment(results: Iterable[ExperimentResult]) -> pd.DataFrame:
    """One line an experiment; a cell that several share counts in each."""
    return _sums("experiment", ((result.experiment.name, r) for result in results for r in result.records.values()))


def _sums(name: str, records: Iterable[tuple[str, Record]]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = [
        {
            name: key,
            "cells": 1,
            **{f"{stage} [s]": seconds for stage, seconds in record.seconds.items()},
            "repaired factors": record.num_repaired,
        }
        for key, record in records
    ]
    sums = pd.DataFrame(rows).groupby(name, as_index=False).sum()
    return sums[[*sums.columns.drop("repaired factors"), "repaired factors"]]
