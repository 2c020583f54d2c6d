"""Comparisons: each point is what `compress` gives, from one data pass, and is kept in a file."""

import pandas as pd
import pytest
import torch

import facts
from facts.compression.pareto import efficient, pareto
from facts.estimators import FACTS
from tests.networks import EveryShape

METHODS = {"estimators": ("facts", "pela"), "searches": ("uniform",), "ratios": (0.4, 0.7)}


class Counting(EveryShape):
    """Counts the batches that go through it with gradients: those of data passes."""

    passes = 0

    def forward(self, images):
        type(self).passes += torch.is_grad_enabled() and not images.is_meta
        return super().forward(images)


@pytest.fixture
def model():
    torch.manual_seed(0)
    Counting.passes = 0
    return Counting()


@pytest.fixture
def evaluate(batches):
    """The mean logit; `count` holds the number of calls."""

    def call(network):
        call.count += 1
        with torch.no_grad():
            return {"logit": torch.cat([network(images) for images, _ in batches]).mean().item()}

    call.count = 0
    return call


def test_each_point_is_what_compress_gives(model, batches, evaluate):
    points = pareto(model, batches, evaluate, **METHODS)
    assert list(zip(points.estimator, points.search, points.ratio, strict=True)) == [
        ("original", "original", 1.0),
        *((e, s, r) for e in METHODS["estimators"] for s in METHODS["searches"] for r in METHODS["ratios"]),
    ]
    assert points.logit[0] == evaluate(model)["logit"]
    assert points.params[0] == sum(parameter.numel() for parameter in model.parameters())
    for point in points[1:].itertuples():
        alone = facts.compress(model, batches, estimator=point.estimator, search=point.search, ratio=point.ratio)
        assert (point.flops, point.params) == (alone.summary.after.flops, alone.summary.after.params)
        assert point.logit == pytest.approx(evaluate(alone.model)["logit"], abs=1e-5)
        assert point.seconds > 0 and point.distance == pytest.approx(alone.summary.distance.mean, rel=1e-3)
    assert points.latency_ms.isna().all()


def test_all_estimators_and_forms_share_one_data_pass(model, batches, evaluate):
    methods = {"estimators": ("facts", "kfac_expand", "svd_llm"), "forms": ("plain", "pivoted")}
    points = pareto(model, batches, evaluate, **methods, searches=("uniform",), ratios=(0.5,))
    assert Counting.passes == 2  # the third batch is held out
    assert points.form.tolist() == ["original"] + 3 * ["plain", "pivoted"]


def test_points_are_kept_when_killed_and_not_computed_again(model, batches, evaluate, tmp_path):
    def killed(network):
        if evaluate.count == 3:
            raise KeyboardInterrupt
        return evaluate(network)

    kept = {"file": tmp_path / "points.csv", "execution": facts.Execution(cache=tmp_path / "cache")}
    with pytest.raises(KeyboardInterrupt):
        pareto(model, batches, killed, **METHODS, **kept)
    before = pd.read_csv(kept["file"])
    assert len(before) == 3  # the original and two of four
    points = pareto(model, batches, evaluate, **METHODS, **kept)
    assert evaluate.count == 5
    assert Counting.passes == 2
    pd.testing.assert_frame_equal(points[:3], before, check_dtype=False)
    again = pareto(model, batches, evaluate, **METHODS, **kept)
    assert evaluate.count == 5
    pd.testing.assert_frame_equal(again, points, check_dtype=False)


def test_other_settings_make_new_rows_next_to_the_older_ones(model, batches, evaluate, tmp_path):
    kept = {"file": tmp_path / "points.csv", "ratios": (0.5,)}
    pareto(model, batches, evaluate, **kept)
    for change in ({"cost": "params"}, {"evaluation_key": "other"}, {"estimators": [FACTS(shrinkage_row=0.2)]}):
        count = evaluate.count
        points = pareto(model, batches, evaluate, **kept, **change)
        assert len(points) == 2
        assert evaluate.count > count
    assert points.estimator[1].startswith("FACTS(shrinkage_row=0.2,")
    count = evaluate.count
    pareto(model, batches[:2], evaluate, **kept)
    assert evaluate.count == count + 2
    assert len(pd.read_csv(kept["file"])) == 2 + 2 + 2 + 1 + 2  # another estimator shares the original


def test_wrong_arguments_are_refused_before_any_work(model, batches, evaluate, tmp_path):
    other = tmp_path / "points.csv"
    other.write_text("a,b\n1,2\n")
    for options, message in (
        ({"ratios": (0.5, 1.5)}, r"must lie in \(0, 1\], got 1.5"),
        ({"loss": lambda outputs, targets: outputs.sum()}, "loss= to have a name of its own"),
        ({"file": other}, "is not a table of this kind"),
        ({"calibration": []}, "calibration data is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            pareto(model, **{"calibration": batches, "evaluate": evaluate} | options)
    assert (Counting.passes, evaluate.count, other.read_text()) == (0, 0, "a,b\n1,2\n")


def test_efficient_points_are_beaten_by_none():
    cost = pd.Series([1, 2, 2, 3, 3, 1])
    quality = pd.Series([10, 12, 11, 12, 13, 10])
    assert efficient(cost, quality).tolist() == [True, True, False, False, True, True]
