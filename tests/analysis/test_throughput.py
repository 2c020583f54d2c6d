import pytest
import torch

import facts
from facts.analysis import Subject, Throughput
from facts.cost.timing import TimingPolicy
from tests.networks import image_batches

QUICK = TimingPolicy(num_turns=2, min_seconds=0)


def findings(model, compressed, **fields):
    held_out = facts.prepare(model.float(), image_batches([2], dtype=torch.float32))
    subject = Subject(calibration=held_out.on([]), held_out=held_out, compressed=compressed)
    return Throughput(batch_size=4, timing=QUICK, **fields).run(subject)


def test_the_network_that_was_made_beside_the_original(model):
    small = facts.compress(model.float(), estimator="pela", ratio=0.5).model
    found = findings(model, small, variants=("residual", "half", "two_of_four"))
    rates = {name: speed["throughput"] for name, speed in found.values["speeds"].items()}
    assert found.metrics["speedup"] == pytest.approx(rates["compressed"] / rates["dense"])
    assert found.metrics["latency_ms"] == pytest.approx(4000 / rates["compressed"])
    if not torch.cuda.is_available():
        assert set(rates) == {"dense", "compressed", "residual", "half"}
        assert "compute capability" in found.values["missing"]["two_of_four"]


def test_an_original_alone(model):
    found = findings(model, None, variants=("residual",))
    assert found.metrics["speedup"] == 1 and set(found.values["speeds"]) == {"dense"}
