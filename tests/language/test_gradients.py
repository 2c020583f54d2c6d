"""Gradients are those of each sequence's own loss, against autograd, one sequence at a time."""

from tests.language import installed  # noqa: F401, I001

import pytest
import torch

from facts.estimators import GFWSVD
from facts.calibration.selection import select_layers
from facts.moments.losses import summed_cross_entropy
from facts.moments import collect_moments
from facts.modules.networks import run
from tests.by_sample import BY_SAMPLE
from tests.language.architectures import build, sequences


@pytest.fixture(scope="module")
def model():
    return build("qwen3").double()


def sequence_gradients(model, batches, name):
    """The weight gradient of every sequence's own loss `[N, m, n]`."""
    weight = model.get_submodule(name).weight
    found = []
    for tokens, targets in batches:
        for i in range(len(tokens)):
            loss = summed_cross_entropy(run(model, tokens[i : i + 1]), targets[i : i + 1])
            found.append(torch.autograd.grad(loss, weight)[0])
    return torch.stack(found)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"])
def test_shampoo_and_gfwsvd_see_each_sequence_s_gradient(model, name):
    batches = sequences()
    grads = sequence_gradients(model, batches, name)
    shampoo, groups = BY_SAMPLE["shampoo2"], GFWSVD(group_size=4)
    moments = collect_moments(model, select_layers(model, [name]).layers, batches, (*shampoo.moments, *groups.moments))[
        name
    ]
    factors = shampoo.factors(moments)
    A, B = (grads.mT @ grads).sum(dim=0), (grads @ grads.mT).sum(dim=0)
    for found, expected in ((factors.A, A), (factors.B, B)):
        assert torch.allclose(found / found.trace(), expected / expected.trace(), rtol=1e-9, atol=1e-12)
    (stored,) = moments[groups.moments[0]].chunks()
    assert torch.allclose(stored, grads.view(2, 4, *grads.shape[1:]).mean(dim=1), rtol=1e-9, atol=1e-12)
