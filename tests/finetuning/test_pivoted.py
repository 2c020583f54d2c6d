"""Pivoted layers are trained as plain factors."""

import copy

import pytest
import torch
from torch import nn

import facts
from facts.finetuning import finetune
from facts.finetuning.state import plain_factors
from facts.modules.forms import FORMS
from tests.finetuning.setting import Given, recipe
from tests.networks import image_batches, make_model, relative_error


def test_pivoted_layers_are_trained_as_plain_factors_and_come_back():
    task = Given([3, 2])
    student = facts.compress(make_model(seed=1), estimator="pela", ratio=0.6, form="pivoted").model
    ranks = {name: module.rank for name, module in student.named_modules() if isinstance(module, facts.PivotedLinear)}
    [(images, _)] = image_batches([4])
    before = student.eval()(images)
    reference = copy.deepcopy(student)
    with plain_factors(reference):
        assert sum(isinstance(module, facts.LowRankLinear) for module in reference.modules()) == len(ranks) > 2
        torch.testing.assert_close(reference(images), before)
        finetune(reference, make_model(), task, recipe())
        expected = reference(images)
    finetune(student, make_model(), task, recipe())
    assert {name: student.get_submodule(name).rank for name in ranks} == ranks
    torch.testing.assert_close(student(images), expected)
    assert relative_error(student(images), before) > 0.01


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_pivots_are_permuted_after_training_only_if_they_were(precision):
    torch.manual_seed(0)
    left, right = torch.randn(200, 60), torch.randn(60, 120)
    model = nn.Sequential(FORMS["pivoted"](precision).layer(nn.Linear(120, 200), left, right))
    permuted = model[0].order is not None
    assert permuted == (precision == torch.bfloat16)
    with plain_factors(model):
        torch.testing.assert_close(model[0].weight, left @ right, rtol=1e-3, atol=1e-3)
    assert (model[0].order is not None) == permuted
