"""Canaries: a few small cells, whose committed digits tell a change of what is computed from one of how."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.compose import CONF
from experiments.output.entries import number, read_entries
from experiments.record import published_records
from experiments.runner import run_cell
from facts.parts import results_of

CANARIES = OmegaConf.load(f"{CONF}/experiment/canaries.yaml")
FOLDER = Path(CONF).parent / "results/mini"
AGAIN = "run python -m experiments.reproduce experiment=canaries"
ADVICE = (
    "the digits of {} have changed. If that is meant: raise RESULTS in facts/utils/version.py, or `results` of a kind "
    f"in facts/parts, and {AGAIN}. If it also happens without your change, this processor rounds otherwise: then "
    "nothing is wrong, so far as the other canaries and the last digit agree."
)


@pytest.mark.parametrize("row", CANARIES.rows)
def test_what_is_computed_changes_with_the_number_of_the_results(make_cell, row):
    """To the digits of the table, and the same plan: alike on an AMD EPYC and an Intel Xeon."""
    entries = {entry.metric: entry for entry in read_entries(FOLDER / "tables/canaries.csv") if entry.row == row}
    records = {record.fingerprint: record for record in published_records("canaries", FOLDER)}
    committed = records[entries["top1"].fingerprint]
    assert committed.identity["results"] == results_of(committed.config["parts"]), (
        "run python -m experiments.reproduce experiment=canaries"
    )
    record = run_cell(make_cell(f"task={CANARIES.task}", *CANARIES.overrides, *CANARIES.mini, *CANARIES.rows[row]))
    digits = {metric: number(record.metrics[metric]) for metric in CANARIES.metrics}
    assert digits == {metric: number(entries[metric].ours) for metric in CANARIES.metrics}, ADVICE.format(row)
    assert record.plan == committed.plan, ADVICE.format(row)
