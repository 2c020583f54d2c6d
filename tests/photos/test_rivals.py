"""Every estimator and search on two published networks and real photos.

Writes `results/photos/rivals*` in 90 minutes.
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


def test_every_method_has_its_place(tmp_path):
    own = ["experiment=rivals_tiny", "workers=2", "hardware.num_threads=1", f"results={tmp_path}"]
    subprocess.run([sys.executable, "-m", "experiments.reproduce", *TASK, *own], cwd=RESULTS.parent, check=True)
    for written, name in WRITTEN.items():
        shutil.copy(tmp_path / "paper" / written, RESULTS / "photos" / name)
    assert set(pd.read_csv(RESULTS / "photos" / "rivals.csv").status) == {"done", "n.a."}
