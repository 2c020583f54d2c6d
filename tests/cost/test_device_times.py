"""Latency on another device: measured there, written to a file, and predicted from it."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import facts
from facts.calibration.prepare import DEFAULT_EXECUTION
from facts.cost.latency import Shape, measured_ranks
from facts.cost.predicted import LinearModel
from facts.modules.forms import FORMS
from facts.search import Uniform
from facts.search.base import SearchResult

SETTINGS = {"estimator": "pela", "search": "uniform"}
PER_WEIGHT, PER_PRODUCT = 1e-6, 1e-5


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))


def law(form, shape, rank):
    """Seconds that are linear in weights and products, so that the model and the interpolation are exact."""
    d_in, d_out, _, rows = shape
    weights = d_in * d_out if rank is None else FORMS[form].num_weights(d_out, d_in, rank)
    return rows * PER_WEIGHT * weights + PER_PRODUCT * (1 if rank is None else 2)


def times_of(form, shape):
    return {
        rank: law(form, shape, rank) for rank in (None, *measured_ranks(FORMS[form].full_rank(shape.d_out, shape.d_in)))
    }


@pytest.fixture
def measured():
    """Times of `Net` on a device, the real ones replaced by those of the law; 1 ms are outside of the layers."""
    times = facts.measure(Net(), (1, 64), batch_size=3, num_turns=1)
    layers = []
    for layer in times.layers:
        dense, *by_rank = times_of(times.form, Shape(layer.d_in, layer.d_out, layer.bias, layer.rows)).items()
        layers.append(replace(layer, dense=dense[1], by_rank=dict(by_rank)))
    whole = 1e-3 + 2 * law("pivoted", Shape(64, 64, True, 1), None)
    return replace(times, device="a board", layers=layers, dense=whole)


def test_what_is_measured_comes_back_from_its_file(tmp_path):
    times = facts.measure(Net(), (1, 64), batch_size=3, num_turns=1, name="mine")
    times.write(tmp_path / "board.json")
    assert facts.DeviceTimes.read(tmp_path / "board.json") == times
    assert (times.network, times.form, times.precision, times.batch_size) == ("mine", "pivoted", "float32", 3)
    assert [(layer.d_in, layer.d_out, layer.rows) for layer in times.layers] == [(64, 64, 1)]  # the classifier is left
    assert times.dense > times.layers[0].dense > 0 and len(times.layers[0].by_rank) == 5


def compress(times, layers=None, latency_ms=None, shape=(1, 64), execution=DEFAULT_EXECUTION, **options):
    prepared = facts.prepare(Net(), input_shape=shape, layers=layers, execution=execution)
    budget = facts.Budget(latency_ms=latency_ms, device_times=times, ratios={} if latency_ms else {"latency": 0.8})
    return facts.compress(prepared, **SETTINGS | options, budget=budget)


@pytest.mark.parametrize("latency_ms", [5.0, None])
def test_ranks_are_allocated_by_them_and_nothing_is_measured(measured, monkeypatch, tmp_path, latency_ms):
    measured.write(tmp_path / "board.json")
    for name in ("facts.cost.latency.module_seconds", "facts.compression.allocation.batch_seconds"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("measured"))
    result = compress(tmp_path / "board.json", latency_ms=latency_ms)
    found = result.summary.latency
    assert 0.95 * found["allowed"] < found["predicted"] <= found["allowed"] < found["dense"] == measured.dense
    ranks = [rank for rank in result.plan.values() if rank]
    expected = 1e-3 + sum(law("pivoted", Shape(64, 64, True, 1), rank) for rank in ranks)
    assert found["predicted"] == pytest.approx(expected)
    assert found["samples"] == 3 and "measured" not in found
    assert "latency is predicted for a board, not measured" in str(result)
    facts.save_compressed(result, tmp_path / "small")
    assert "latency, predicted for a board (ms)" in (tmp_path / "small" / "README.md").read_text()
    assert facts.load_compressed(tmp_path / "small", Net()).summary == result.summary


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_other_sizes_by_a_linear_model(form):
    known = [Shape(64, 64, True, 7), Shape(32, 128, True, 7), Shape(128, 48, False, 3)]
    model = LinearModel(FORMS[form], {shape: times_of(form, shape) for shape in known})
    for shape in (Shape(96, 80, True, 5), Shape(512, 256, True, 20)):
        times = model.times(shape)
        assert times == pytest.approx(times_of(form, shape))
        assert sorted(times[rank] for rank in times if rank) == [times[rank] for rank in times if rank]


def test_a_layer_that_was_not_measured_is_named(measured, caplog):
    with caplog.at_level(logging.WARNING):
        latency = compress(measured, layers=["0", "4"]).summary.latency
    assert "not measured on a board, so predicted by size: 4" in caplog.text
    assert 0 < latency["predicted"] <= latency["allowed"]


def test_a_missed_budget_is_an_error_since_nothing_is_measured(measured, monkeypatch):
    monkeypatch.setattr(Uniform, "allocate", lambda search, problem: SearchResult(dict.fromkeys(problem.layers)))
    with pytest.raises(ValueError, match="Uniform exceeds the budget: latency of the compressed layers would be"):
        compress(measured)


def test_times_of_something_else_are_refused(measured, tmp_path):
    half = facts.Execution(torch.bfloat16)
    for options, words in (
        ({"form": "plain"}, "of a board are for form pivoted, but plain is wanted"),
        ({"form": "pivoted", "execution": half}, "for precision float32, but bfloat16 is"),
        ({"shape": (2, 7, 64)}, "are for Net .* not for this network .*: measure this one there"),
    ):
        with pytest.raises(ValueError, match=words):
            compress(measured, latency_ms=5, **options)
    first = measured.layers[0]
    for times in (replace(measured, dense=first.dense), replace(measured, layers=[replace(first, dense=1.0)])):
        with pytest.raises(ValueError, match=r"of a board cannot be right: of the network's .* Measure again on"):
            compress(times, latency_ms=5)
    with pytest.raises(ValueError, match="dense"):
        replace(measured, dense=1e308)
    for text in ("", "[]", '{"device": "a board"}', '{"layers": NaN}'):
        (tmp_path / "board.json").write_text(text)
        with pytest.raises(ValueError, match=r"board.json is not from `facts measure` \(.*\): measure again"):
            compress(tmp_path / "board.json")
    with pytest.raises(FileNotFoundError, match="absent"):
        compress(tmp_path / "absent.json")
    for options in ({"batch_size": 0}, {"num_turns": 0}):
        with pytest.raises(ValueError, match="batch_size and num_turns must be at least 1"):
            facts.measure(Net(), (1, 64), **options)
