"""Every estimator, search and refit on two published networks and real photos.

`pytest tests/photos/test_rivals.py --write-results` measures for 90 minutes and writes `results/photos/rivals*`.
"""

import shutil
import subprocess
import sys

import pandas as pd
import pytest

from tests.photos.data import DATA, RESULTS

pytestmark = pytest.mark.external

TASK = ["--config-dir", "tests/photos/conf", "profile=paper", "task=photos", f"checkpoints={DATA}", "tracking=off"]
WRITTEN = {
    "tables/rivals_tiny.md": "rivals.md",
    "tables/rivals_tiny.csv": "rivals.csv",
    "figures/rivals_tiny.png": "rivals_ranking.png",
    "figures/rivals_tiny.csv": "rivals_ranking.csv",
}


def run(module, *arguments, folder):
    command = [sys.executable, "-m", f"experiments.{module}", *TASK, *arguments, f"results={folder}"]
    subprocess.run(command, cwd=RESULTS.parent, check=True)


@pytest.mark.parametrize(("network", "top1"), [("vit_tiny", 83.2), ("deit_tiny", 80.2)])
def test_the_task_judges_a_dense_network_as_the_other_tests_do(network, top1, tmp_path):
    run("run", f"model={network}", "estimator=none", folder=tmp_path)
    (record,) = (tmp_path / "paper" / "records").glob("*.json")
    assert pd.read_json(record, typ="series").metrics["top1"] == pytest.approx(top1, abs=0.05)  # as it is rounded


def test_every_method_has_its_place(tmp_path, pytestconfig):
    if not pytestconfig.getoption("--write-results"):
        pytest.skip("takes 90 minutes: only with --write-results")
    run("reproduce", "experiment=rivals_tiny", "workers=2", "hardware.num_threads=1", folder=tmp_path)
    for written, name in WRITTEN.items():
        shutil.copy(tmp_path / "paper" / written, RESULTS / "photos" / name)
    assert set(pd.read_csv(RESULTS / "photos" / "rivals.csv").status) == {"done", "n.a."}
