"""A network's own checkpointing: blocks run again in the backward pass, and nothing that is computed changes."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import facts
from facts.moments import GradGram, GroupGradients, InputGram, MeanInputGram, SampleGradGrams, collect_moments
from facts.moments.losses import next_tokens, summed_cross_entropy
from facts.parts.layers import select_layers
from tests.networks import Runs, image_batches, make_causal_lm, make_sharing, make_vit, same_weights

MOMENTS = (InputGram(), GradGram(), MeanInputGram(), SampleGradGrams(), GroupGradients(group_size=2))
LARGER = image_batches([3, 2, 8], shape=(3, 16, 16))
TEXTS = [(ids, next_tokens(ids)) for ids in torch.randint(64, (5, 12)).split(2)]


def checkpointed_by_hand(model):
    """A layer is called in several blocks, and once where the loss does not see it."""

    def step(block, x):
        checkpoint(block, 2 * x, use_reentrant=False)
        return checkpoint(block, x, use_reentrant=False)

    model.step = step


def unused_once(block, x):
    block(2 * x)
    return block(x)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize(
    ("make", "set_checkpointing", "batches", "block", "runs_again"),
    [
        (make_vit, lambda model: model.set_grad_checkpointing(), LARGER, "blocks.1", True),
        (partial(make_sharing, unused_once), checkpointed_by_hand, image_batches([3, 1]), "blocks.1", True),
        # transformers checkpoints in training alone, which a pass is not.
        (partial(make_causal_lm, "llama"), lambda model: model.gradient_checkpointing_enable(), TEXTS, "", False),
    ],
)
def test_moments_are_the_same(make, set_checkpointing, batches, block, runs_again):
    model = make()
    layers = select_layers(model).layers
    runs = Runs(model.get_submodule(block))
    expected = collect_moments(model, layers, batches, MOMENTS)
    once = runs.number
    set_checkpointing(model)
    found = collect_moments(model, layers, batches, MOMENTS)
    assert (runs.number > 2 * once) == runs_again
    for name in layers:
        for moment in MOMENTS:
            for one, other in zip(found[name][moment], expected[name][moment], strict=True):
                assert other.any()
                torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{"parts": "units"}, {"layers": "blocks.*", "loss": summed_cross_entropy}])
def test_compressions_are_the_same(options):
    model = make_vit()
    expected = facts.compress(model, LARGER, ratio=0.6, **options)
    model.set_grad_checkpointing()
    found = facts.compress(model, LARGER, ratio=0.6, **options)
    assert found.plan == expected.plan and same_weights(found.model, expected.model)
