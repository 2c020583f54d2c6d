"""A table comes out alike, byte for byte, however often its makers are killed; `kills.py` does it for an hour."""

import pytest

from tests.attacks.kills import attack, tables

pytestmark = [pytest.mark.attack, pytest.mark.system]

KILLS = 3
WORK = (
    "experiment=fisher_estimators",
    "workers=2",
    "task.mini.num_calibration=128",
    "task.mini.num_factors_per_class=2",
    "task.mini.num_held_out_per_class=2",
)


def test_a_table_survives_kills(tmp_path, record_property):
    assert attack(tmp_path, KILLS, WORK, seconds=10) >= 1
    assert (tmp_path / "killed_0" / "log").read_text().count("fisher_estimators: 14 cells") >= 2  # killed at work
    (text,) = tables(tmp_path / "killed_0").values()
    assert text.count(",done,") > 14
    record_property("attacks", KILLS)
