"""Records and a small results folder, made up: cells of every status, written as `reproduce` writes them."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from omegaconf import OmegaConf

from experiments import paper
from experiments.cell import Cell
from experiments.config import Experiment
from experiments.output.entries import entries_of, places_of
from experiments.output.results import draw_figure, values_of
from experiments.output.tables import write_tables
from experiments.record import Record, packed, write_record
from facts.cost.count import Cost
from facts.result import Summary

REASON = "as in the paper, which has <none> & says why"
PLAIN, BOTH = "A <plain> & simple", "A + CoRS"
TOP1 = {"Baseline": 98.0, PLAIN: 61.5, "B": 9.25, "C": 99.5, "D": 100.0, BOTH: 90.0}  # C is level with D
NUM_SAMPLES = 400


def make_summary(**fields: Any) -> Summary:
    return Summary(Cost(2, 2), Cost(1, 1), **fields)


def make_record(fingerprint: str = "f", status: str = "done", **fields: Any) -> Record:
    usual = {"config": {"profile": {"name": "mini"}}, "identity": {}, "model_hash": "m", "data_hash": "d"}
    return Record(fingerprint, status, **usual | fields)


def outcomes(top1: float) -> dict[str, str]:
    """Pack outcomes of which the first so many percent count."""
    return {"top1": packed(torch.arange(NUM_SAMPLES) < top1 / 100 * NUM_SAMPLES)}


def place(row: str, record: Record | None = None, column: str = "Net", table: str = "demo", **fields: Any) -> Cell:
    return Cell(OmegaConf.create(), table, row, column, record=record, **fields)


def demo(**fields: Any) -> Experiment:
    """Make an experiment of one column and one metric, unless fields say otherwise."""
    usual = {"name": "demo", "title": "A demonstration", "metrics": {"top1": "Top-1"}, "ranked_by": "top1"}
    return Experiment(**{**usual, "columns": {"Net": []}, **fields})


def table(ratio: int) -> Experiment:
    """One of two tables that differ in their budget alone."""
    rows: dict[str, list[str]] = {row: [] for row in [*TOP1, "Failing", "Later"]}
    return demo(
        name=f"demo_{ratio}",
        title=f"A demonstration at {ratio} %",
        metrics={"gflops": "GFLOPs", "top1": "Top-1", "minutes": "Search [min]"},
        columns={"Net": [], "Other": []},
        rows={**rows, "Baseline": ["estimator=none"], BOTH: ["estimator=facts", "search=cors"]},
        unranked=["Baseline"],
        not_applicable={"B": {"Other": REASON}},
        notes=["A note on `mini` & <others>."],
    )


TWO = {"0.5": [], "none": []}
ABLATION = demo(name="demo_ablation", title="An ablation", figure="ablation", axis_title="alpha", rows=TWO)
MAPS = Experiment(name="demo_maps", title="Maps", figure="token_couplings", columns={"Net": []}, rows={"map": []})
RATIOS = {"demo_40": 40, "demo_50": 50}
EXPERIMENTS = [*map(table, RATIOS.values()), ABLATION, MAPS]


def _record(experiment: Experiment, row: str, column: str) -> Record | None:
    if row == "Later":
        return None
    ratio = RATIOS.get(experiment.name, 0)
    name = f"{row}, {ratio}, {column}".encode().hex()
    if row == "Failing":
        error = "Traceback (most recent call last):\n  somewhere\nValueError: 3 < 4 & no luck\n"
        return make_record(name, "failed", error=error)
    top1 = TOP1.get(row, 50.0)
    metrics = {"gflops": 2.0 if row == "Baseline" else ratio / 50, "top1": top1}
    return make_record(name, metrics=metrics, outcomes=outcomes(top1))


def write_paper(path: Path, top1: dict[str, float]) -> None:
    """Write the paper's numbers of a table: the top-1 of every row, and 10 GFLOPs each."""
    lines = [(row, "Net", *number) for row, value in top1.items() for number in (("gflops", 10.0), ("top1", value))]
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame(lines, columns=["row", "column", "metric", "paper"]).to_csv(path, index=False)


def write_results(folder: Path) -> list[Experiment]:
    for experiment in EXPERIMENTS[:3]:
        shown = [each for each in places_of(experiment) if each[1] not in experiment.not_applicable.get(each[0], {})]
        cells = [place(row, _record(experiment, row, column), column, experiment.name) for row, column in shown]
        for cell in cells:
            if cell.record:
                write_record(cell.record, folder / "records")
        if experiment.name in RATIOS:
            write_paper(folder / "paper" / f"{experiment.name}.csv", {row: top1 - 5 for row, top1 in TOP1.items()})
        with patch.object(paper, "FOLDER", folder / "paper"):
            write_tables(experiment, entries_of(experiment, cells, comparable=False), folder / "tables")
    records = {(cell.row, cell.column): cell.record for cell in cells}
    draw_figure(ABLATION, values_of(ABLATION, records), folder / "figures")
    return EXPERIMENTS
