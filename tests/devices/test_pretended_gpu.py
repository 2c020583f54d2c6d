"""Every stage runs on a device that is not the CPU, and gives there what it gives on the CPU."""

import pytest
import torch
from torch import nn

import facts
from facts.estimators import ESTIMATORS
from facts.modules.lowrank import LowRankLayer
from tests.devices.pretended import pretended_cuda, values_of
from tests.networks import image_batches, make_causal_lm, make_model, make_vit

pytestmark = pytest.mark.system


def values(model):
    """Weights, of low-rank layers the products: singular vectors have either sign."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | LowRankLayer)}
    return {name: values_of(layer.weight.detach()).cpu() for name, layer in layers.items()}


def compressed(model, batches, estimator="facts", **options):
    result = facts.compress(model, batches, estimator=estimator, ratio=0.6, **options)
    return values(facts.recover(result, batches, epochs=1, num_warmups=0, precision="float32").model)


TEXTS = list(torch.randint(64, (3, 2, 12), generator=torch.Generator().manual_seed(0)))
BATCHES, LARGER = image_batches([4, 4, 4]), image_batches([4, 4], shape=(3, 16, 16))
HOST, CHECKPOINTED = facts.MemoryPolicy(moments="host", layers_at_once=2), facts.MemoryPolicy(checkpoint_blocks=True)
WORKS = {name: (make_model, BATCHES, {"estimator": name, "search": "uniform"}) for name in ESTIMATORS} | {
    "host": (make_vit, LARGER, {"execution": facts.Execution(memory=HOST)}),
    "measured": (make_vit, LARGER, {"execution": facts.Execution(memory=CHECKPOINTED), "search": "cors"}),
    "language model": (make_causal_lm, TEXTS, {"form": "plain"}),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_compression_and_its_recovery(name):
    make, batches, options = WORKS[name]
    here = compressed(make(), batches, **options)
    with pretended_cuda():
        there = compressed(make().to("cuda"), batches, **options)
    for place, tensor in here.items():
        torch.testing.assert_close(there[place], tensor, rtol=1e-5, atol=1e-6, msg=place)
