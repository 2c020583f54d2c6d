"""Variants of a network, and speeds in turns."""

from dataclasses import replace

import pytest
import torch

import facts
from facts.analysis import AnalysisInputs, Throughput
from facts.analysis.throughput import make_variant
from facts.cost.count import count_params
from facts.cost.timing import TimingPolicy, batch_seconds
from facts.modules.lowrank import LowRankLinear
from facts.parts.layers import select_layers
from tests.networks import UNIFORM, image_batches

QUICK = TimingPolicy(num_turns=2, min_seconds=0)
IMAGES = image_batches([4])[0][0]
types = set()


def note_types(module, args, output):
    """A hook that can be pickled."""
    types.update((args[0].dtype, output.dtype))


@pytest.fixture
def compressed(model):
    return facts.compress(facts.prepare(model, input_shape=(3, 8, 8)), estimator="pela", ratio=0.5, **UNIFORM).model


def findings(model, compressed, **fields):
    held_out = facts.prepare(model, image_batches([2], dtype=next(model.parameters()).dtype))
    inputs = AnalysisInputs(prepared=replace(held_out, data=None), held_out=held_out, compressed=compressed)
    return Throughput(batch_size=4, timing=QUICK, **fields).run(inputs)


def test_findings_with_variants(model, compressed):
    found = findings(model.float(), compressed.float(), variants=("residual", "half", "two_of_four"))
    rates = {name: speed["throughput"] for name, speed in found.values["speeds"].items()}
    assert found.metrics["speedup"] == pytest.approx(rates["compressed"] / rates["dense"])
    assert found.metrics["speedup_error"] > 0
    assert found.metrics["latency_ms"] == pytest.approx(4000 / rates["compressed"])
    if not torch.cuda.is_available():
        assert set(rates) == {"dense", "compressed", "residual", "half"}
        assert "compute capability" in found.values["missing"]["two_of_four"]


def test_residuals_are_added_to_low_rank_layers_and_take_five_percent(model, compressed):
    layers = select_layers(model).layers
    network = make_variant("residual", model, compressed, layers)
    assert network(IMAGES).isfinite().all() and not torch.equal(network(IMAGES), compressed(IMAGES))
    shapes = [layers[name].weight.shape for name in layers if isinstance(compressed.get_submodule(name), LowRankLinear)]
    added = sum(max(1, int(0.05 * (shape.numel() // sum(shape)))) * sum(shape) for shape in shapes)
    assert added and count_params(network) - count_params(compressed) == added
    assert not any("residual" in name for name, _ in compressed.named_modules())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_network_in_half_precision_gets_its_inputs_in_it(model, compressed, precision):
    half = make_variant("half", model.float(), compressed, {})
    half.vector.register_forward_hook(note_types)
    types.clear()
    found = batch_seconds({"dense": model, "half": half}, IMAGES.float(), QUICK, precision)
    assert found["half"].median > 0 and types == {torch.float16}
    assert next(model.parameters()).dtype == torch.float32
