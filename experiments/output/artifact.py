"""An experiment's results as one W&B artifact: table, figure, the rank of every layer, and the records behind them."""

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.config import Experiment
from experiments.grid import GridCell
from experiments.record import versions


def publish(run: Any, experiment: Experiment, grid: Sequence[GridCell], folder: Path) -> None:
    """Log the files of the experiment in `folder` as an artifact of type `report`, one version per call."""
    import wandb

    snapshot = Path(run.dir).with_name("report")  # a copy: the next table may be written before this is synced
    snapshot.mkdir()
    plans_of(grid).to_csv(snapshot / "plans.csv", index=False)
    shown = [path for kind in ("tables", "figures") for path in (folder / kind).glob(f"{experiment.name}.*")]
    fingerprints = {cell.record.fingerprint for cell in grid if cell.record}
    for path in [*shown, *(folder / "records" / f"{fingerprint}.json" for fingerprint in fingerprints)]:
        copy = snapshot / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    cells = Counter(cell.status for cell in grid)
    artifact = wandb.Artifact(
        f"{experiment.name}-{folder.name}",
        type="report",
        description=experiment.title,
        metadata={"profile": folder.name, "cells": dict(cells), "versions": versions()},
    )
    for path in filter(Path.is_file, snapshot.rglob("*")):
        artifact.add_file(str(path), str(path.relative_to(snapshot)), skip_cache=True, policy="immutable")
    run.log_artifact(artifact)


def plans_of(grid: Iterable[GridCell]) -> pd.DataFrame:
    """List the rank of every layer of every cell, empty for a layer left dense."""
    ranks = [
        (cell.row, cell.column, layer, rank) for cell in grid if cell.record for layer, rank in cell.record.plan.items()
    ]
    return pd.DataFrame(ranks, columns=["row", "column", "layer", "rank"]).astype({"rank": "Int64"})
