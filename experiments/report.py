"""One page on what was measured, with what, and how long it took."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from experiments.config import Experiment
from experiments.record import Record
from facts.files import replacing


def write_report(experiments: Iterable[Experiment], records: list[Record], folder: Path) -> None:
    """`report.md` beside the tables."""
    records = list({record.fingerprint: record for record in records}.values())
    with replacing(folder / "report.md") as path:
        path.write_text(report(experiments, records, folder))


def report(experiments: Iterable[Experiment], records: list[Record], folder: Path) -> str:
    lines = [f"# Results, profile `{folder.name}`", ""]
    for experiment in experiments:
        files = {"table": f"tables/{experiment.name}.md"} if experiment.metrics else {}
        if experiment.figure:
            files["figure"] = f"figures/{experiment.name}.png"
        lines.append(f"- {experiment.title}: {', '.join(f'[{kind}]({file})' for kind, file in files.items())}")
    if not records:
        return "\n".join([*lines, "", "No cell has run yet.", ""])
    latest = max(records, key=lambda record: record.time)
    lines += ["", "## With what", "", f"{len(records)} cells, the last one on {latest.time}."]
    commits = sorted(
        {f"{r.git.get('sha', 'unknown')[:12]}{' (changed)' if r.git.get('dirty') else ''}" for r in records}
    )
    lines += ["", f"Commit: {', '.join(commits)}.", ""]
    facts = {**latest.machine, **latest.versions}
    lines += [pd.DataFrame(facts.items(), columns=["what", "value"]).to_markdown(index=False)]
    lines += ["", "## How long, and what had to be repaired", ""]
    lines += ["Seconds are sums over cells; a repaired factor is one that was not positive definite.", ""]
    lines += [_by_estimator(records).to_markdown(index=False, floatfmt=".1f"), ""]
    return "\n".join(lines)


def _by_estimator(records: list[Record]) -> pd.DataFrame:
    rows = [
        {
            "estimator": (record.config["estimator"]["_target_"] or "none").rpartition(".")[2],
            "cells": 1,
            **{f"{stage} [s]": seconds for stage, seconds in record.seconds.items()},
            "repaired factors": sum(record.repaired.values()),
        }
        for record in records
    ]
    return pd.DataFrame(rows).groupby("estimator", as_index=False).sum()
