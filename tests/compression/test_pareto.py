"""Points of several methods: as many as asked for, from one data pass, each as if compressed alone, and kept."""

import pandas as pd
import pytest
import torch
from facts.compression.pareto_table import efficient

import facts
from facts.compression.pareto import pareto
from facts.cost.timing import TimingPolicy
from facts.estimators import FACTS
from tests.networks import EveryShape

METHODS = {"estimators": ("facts", "pela"), "searches": ("uniform", "cors"), "ratios": (0.4, 0.7)}


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
    """The mean logit, and how often it was asked for."""

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
        assert point.seconds > 0
    assert points.latency_ms.isna().all()


def test_all_estimators_share_one_data_pass(model, batches, evaluate):
    estimators = ("facts", "kfac_expand", "shampoo2", "svd_llm", "fwsvd")
    pareto(model, batches, evaluate, estimators=estimators, ratios=(0.5,), searches=("uniform",), forms=("plain",))
    assert Counting.passes == len(batches)


def test_points_are_kept_when_killed_and_not_computed_again(model, batches, evaluate, tmp_path):
    def killed(network):
        if evaluate.count == 3:
            raise KeyboardInterrupt
        return evaluate(network)

    kept = {"file": tmp_path / "points.csv", "cache": tmp_path / "cache"}
    with pytest.raises(KeyboardInterrupt):
        pareto(model, batches, killed, **METHODS, **kept)
    before = pd.read_csv(kept["file"])
    assert len(before) == 3  # the original and two of eight
    points = pareto(model, batches, evaluate, **METHODS, **kept)
    assert evaluate.count == 9
    assert Counting.passes == len(batches)
    pd.testing.assert_frame_equal(points[:3], before, check_dtype=False)
    again = pareto(model, batches, evaluate, **METHODS, **kept)
    assert evaluate.count == 9
    pd.testing.assert_frame_equal(again, points, check_dtype=False)


def test_other_settings_are_other_points_beside_the_older_ones(model, batches, evaluate, tmp_path):
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


class Reading:
    """Batches in another order at every reading, as of a loader that shuffles; how many were read."""

    def __init__(self, batches):
        self.batches, self.count = batches, 0

    def __iter__(self):
        order = torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(self.count))
        for index in order:
            self.count += 1
            yield self.batches[index]


def test_data_without_a_key_are_read_once(model, batches, evaluate):
    calibration, sensitivity = Reading(batches), Reading(batches[:2])
    pareto(model, calibration, evaluate, **METHODS, sensitivity=sensitivity)
    assert (calibration.count, sensitivity.count) == (3, 2)


@pytest.mark.parametrize("cache", [None, "cache"])
def test_a_loss_without_a_name_is_refused_before_any_work(model, batches, evaluate, tmp_path, cache):
    with pytest.raises(ValueError, match="pareto keeps moments between methods: give loss= as a function at the top"):
        pareto(model, batches, evaluate, loss=lambda outputs, targets: outputs.sum(), cache=cache and tmp_path / cache)
    assert Counting.passes == 0


def test_latency_is_measured_where_it_is_the_cost(model, batches, evaluate):
    quick = TimingPolicy(num_turns=2, min_seconds=0)
    points = pareto(model, batches, evaluate, estimators=("pela",), ratios=(1.0,), cost="latency", timing=quick)
    assert (points.latency_ms > 0).all()


def test_images_without_labels_are_enough(model, batches, evaluate):
    points = pareto(model, [images for images, _ in batches], evaluate, ratios=(0.5,))
    assert list(points.estimator) == ["original", "facts"]


def test_a_method_that_fails_does_not_stop_the_others(model, batches, evaluate, caplog):
    points = pareto(
        model,
        batches,
        evaluate,
        estimators=("pela",),
        searches=("cors", "uniform"),
        ratios=(1e-6, 0.5),
        forms=("plain",),
    )
    assert {(search, ratio) for search, ratio in zip(points.search, points.ratio, strict=True)} >= {("cors", 0.5)}
    assert ("cors", 1e-6) not in {*zip(points.search, points.ratio, strict=True)}
    assert "pela, cors, plain, 1e-06: " in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimators": ("fact",)}, "unknown estimator 'fact'"),
        ({"searches": ("core",)}, "unknown search 'core'"),
        ({"ratios": (0.5, 1.5)}, r"must lie in \(0, 1\], got 1.5"),
        ({"cost": "joules"}, "cost must be one of flops, params, latency, got 'joules'"),
    ],
)
def test_wrong_arguments_are_told_before_any_work(model, batches, evaluate, options, message):
    with pytest.raises(ValueError, match=message):
        pareto(model, batches, evaluate, **options)
    assert (Counting.passes, evaluate.count) == (0, 0)


def test_no_data(model, evaluate):
    with pytest.raises(ValueError, match="calibration data is empty"):
        pareto(model, [], evaluate)


def test_a_file_of_another_kind_is_left_alone(model, batches, evaluate, tmp_path):
    file = tmp_path / "points.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is no table of this kind"):
        pareto(model, batches, evaluate, file=file)
    assert file.read_text() == "a,b\n1,2\n"


def test_efficient_points_are_beaten_by_none():
    cost = pd.Series([1, 2, 2, 3, 3, 1])
    quality = pd.Series([10, 12, 11, 12, 13, 10])
    assert efficient(cost, quality).tolist() == [True, True, False, False, True, True]
