"""Comparisons: each point is what `compress` gives, from one data pass, and is written as soon as it is known."""

import pandas as pd
import pytest
import torch

import facts
from tests.networks import EveryShape
from tests.refusals import refuses

METHODS = {"estimators": ("facts", "svd_llm", "pela"), "searches": ("uniform",), "ratios": (0.4, 0.7)}


class Counting(EveryShape):
    """Counts the batches that go through it with gradients: those of data passes."""

    passes = 0

    def forward(self, images):
        type(self).passes += torch.is_grad_enabled() and not images.is_meta
        return super().forward(images)


@pytest.fixture
def prepared(batches):
    torch.manual_seed(0)
    Counting.passes = 0
    return facts.prepare(Counting(), batches)


def test_each_point_is_what_compress_gives_and_all_share_one_data_pass(prepared, batches, tmp_path):
    @torch.no_grad()  # else it would be counted
    def evaluate(network):
        return {"logit": torch.cat([network(images) for images, _ in batches]).mean().item()}

    before = Counting.passes
    points = facts.pareto(prepared, evaluate, **METHODS, file=tmp_path / "points.csv", form="plain")
    assert Counting.passes - before == 2  # the third batch is held out
    combinations = [(e, s, r) for e in METHODS["estimators"] for s in METHODS["searches"] for r in METHODS["ratios"]]
    found = list(zip(points.estimator, points.search, points.ratio, strict=True))
    assert found == [("original", "original", 1.0), *combinations]
    assert points.logit[0] == evaluate(prepared.model)["logit"] and points.distance[0] == 0
    for point in points[1:].itertuples():
        options = {"estimator": point.estimator, "search": point.search, "ratio": point.ratio, "form": "plain"}
        alone = facts.compress(prepared, **options)
        assert (point.flops, point.params) == (alone.summary.after.flops, alone.summary.after.params)
        assert point.logit == pytest.approx(evaluate(alone.model)["logit"], abs=1e-5)
        assert point.distance == pytest.approx(alone.summary.distance.mean, rel=1e-3) and point.form == "plain"
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "points.csv"), points, check_dtype=False)


def test_points_are_kept_when_killed_and_failures_left_out(prepared, tmp_path, monkeypatch):
    networks = []

    def killed(network):
        networks.append(network)
        if len(networks) == 4:
            raise KeyboardInterrupt
        return {"number": len(networks)}

    with pytest.raises(KeyboardInterrupt):
        facts.pareto(prepared, killed, **METHODS | {"ratios": (1e-9, 0.4, 0.7)}, file=tmp_path / "points.csv")
    assert pd.read_csv(tmp_path / "points.csv").ratio.tolist() == [1.0, 0.4, 0.7]
    before = Counting.passes
    refuses("no method produced a compressed network", facts.pareto, prepared, killed, ratios=(1e-9,))
    assert Counting.passes == before
    monkeypatch.setattr(type(prepared), "collect", lambda *_: pytest.fail("a data pass"))
    refuses("must lie in", facts.pareto, prepared, killed, ratios=(0.5, 1.5))
