"""DISP-LLM's gates and indexed blocks."""

import pytest
import torch

from facts.pruning import DISP
from facts.pruning.methods.disp_llm import gate_widths, gated, indexed, remaining_weights, target_share
from tests.pruning.problems import make_problem, make_vit


def random_masks(model, share=0.6):
    return [torch.rand(width) < share for width in gate_widths(model)]


def test_an_indexed_network_computes_what_the_gated_one_does_with_the_weights_that_the_masks_leave():
    model, images = make_vit(), torch.randn(3, 3, 8, 8)
    masks = random_masks(model)
    with gated(model, masks):
        expected = model(images)
    small = indexed(model, masks)
    torch.testing.assert_close(small(images), expected)
    assert not model(images).allclose(expected)  # the gates are gone
    linears = [layer for layer in small.blocks.modules() if isinstance(layer, torch.nn.Linear)]
    left = remaining_weights(model, [mask.float() for mask in masks])
    assert int(left) == sum(layer.weight.numel() for layer in linears)
    assert all(layer.weight.shape == (layer.out_features, layer.in_features) for layer in linears)


@pytest.mark.parametrize("cost", ["params", "flops"])
def test_the_target_of_the_matrices_is_that_of_the_network(cost):
    model = make_vit()
    problem = make_problem(model, ratio=0.7, cost=cost)
    masks = [torch.rand(width) < 0.83 for width in gate_widths(model)]
    dense = remaining_weights(model, [torch.ones(width) for width in gate_widths(model)])
    share = remaining_weights(model, [mask.float() for mask in masks]) / dense
    spent = problem.spent(indexed(model, masks))
    # Biases and GELU go too, which the target leaves out.
    assert float(share) - target_share(problem, int(dense)) == pytest.approx((spent - problem.budget) / spent, abs=0.05)


def test_features_without_effect_are_learned_to_go():
    model = make_vit(depth=1)
    with torch.no_grad():
        model.blocks[0].mlp.fc2.weight[:, :24] = 0
        model.blocks[0].mlp.fc1.bias.copy_(torch.arange(48) / 100)  # they tell which units are left
    images = torch.randn(16, 3, 8, 8)
    targets = model(images).detach()
    problem = make_problem(
        model, 0.75, batches=[(images, targets)], loss=lambda outputs, targets: 1e4 * (outputs - targets).square().sum()
    )
    pruned = DISP(num_steps=100, learning_rate=0.01).prune(problem)
    units = (pruned.blocks[0].mlp.fc1.bias.detach() * 100).round().int()
    assert (units >= 24).sum() > 1.5 * (units < 24).sum()
