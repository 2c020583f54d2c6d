"""A cell comes out alike on processors that round otherwise, near-singular factors included."""

import pytest
import torch

from experiments.runner import open_cell, run_cell
from facts.decomposition import truncation

pytestmark = pytest.mark.system

POINTS = 0.2  # of top-1: six of 3,000 samples
# Many of its factors are near-singular: without a floor on eigenvalues, this cell differed by 11 points.
CELL = ("model=convnext_b", "estimator=gfwsvd", "ratio=0.5", "task.mini.num_calibration=512")


def test_noise_of_rounding(cell_config, monkeypatch, tmp_path):
    """The size of rounding in float64, on every factor."""
    expected = run_cell(open_cell(cell_config(*CELL, f"results={tmp_path / 'plain'}"))).metrics["top1"]
    plain, noisy = truncation.square_root, []

    def square_root(factor, *arguments, **options):
        if factor is not None:
            factor = factor.double() * (1 + 1e-15 * torch.randn_like(factor, dtype=torch.float64))
            noisy.append(factor)
        return plain(factor, *arguments, **options)

    monkeypatch.setattr(truncation, "square_root", square_root)
    record = run_cell(open_cell(cell_config(*CELL)))
    assert noisy and record.num_repaired > 0
    assert record.metrics["top1"] == pytest.approx(expected, abs=POINTS)
