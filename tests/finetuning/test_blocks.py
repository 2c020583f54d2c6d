"""Blocks of a compressed network are taught the outputs of the original's."""

import torch
from torch import nn

import facts
from facts.finetuning import Finetuning, finetune
from facts.finetuning.inputs import Inputs
from facts.finetuning.recipe import compressed_blocks, matching_error, outputs_of
from facts.moments.losses import kl_divergence
from tests.networks import image_batches, make_vit

BATCHES = image_batches([8] * 4, shape=(3, 16, 16))


def compressed(model, **options):
    return facts.compress(model, estimator="pela", search="uniform", ratio=0.5, **options)


def test_blocks_are_those_with_low_rank_or_narrower_layers():
    model = make_vit()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "blocks.1" in name]
    assert compressed_blocks(compressed(model, layers=layers).model, model) == ["blocks.1"]
    assert compressed_blocks(compressed(model).model, model) == [f"blocks.{i}" for i in range(3)]
    assert compressed_blocks(model, model) == []
    prepared = facts.prepare(model, BATCHES, layers=layers, parts="units")
    assert compressed_blocks(facts.compress(prepared, search="uniform", ratio=0.5).model, model) == ["blocks.1"]


def test_the_error_is_a_sum_over_samples_and_blocks():
    original = make_vit()
    changed = compressed(original).model
    names = compressed_blocks(changed, original)
    [(images, _)] = image_batches([5], shape=(3, 16, 16))
    with torch.no_grad(), outputs_of(original, names) as ours, outputs_of(changed, names) as theirs:
        original(images)
        changed(images)
    expected = sum(
        ((other[i] - one[i]).norm() / one[i].norm()) ** 2
        for one, other in zip(ours, theirs, strict=True)
        for i in range(5)
    )
    torch.testing.assert_close(matching_error(ours, theirs, 5), expected)
    assert matching_error(ours, ours, 5) == 0 < expected
    assert len(ours) == len(names) and not original._forward_hooks
    assert matching_error([torch.zeros(5, 2)], [torch.zeros(5, 2)], 5) == 0
    assert matching_error([torch.ones(5, 2)], [torch.zeros(5, 3)], 5) == 0


def test_blocks_come_nearer_if_they_count():
    """More so than when the outputs alone are taught; the weight of the blocks' errors is all that differs."""
    original = make_vit()
    inputs = Inputs(BATCHES, kl_divergence, part_size=8, held_back=0.25, views=False)
    errors = {}
    for weight in (0.0, 1.0):
        student = compressed(original).model
        recipe = Finetuning(num_epochs=20, learning_rate=1e-3, alpha=1.0, weight_decay=0.0, block_weight=weight)
        finetune(student, original, inputs, recipe)
        names = compressed_blocks(student, original)
        with torch.no_grad(), outputs_of(original, names) as ours, outputs_of(student, names) as theirs:
            images = BATCHES[-1][0]
            original(images)
            student(images)
        errors[weight] = matching_error(ours, theirs, len(images)).item()
    assert errors[1.0] < 0.7 * errors[0.0]
