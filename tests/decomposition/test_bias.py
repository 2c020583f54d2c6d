"""Biases that take up the mean of what truncation takes away."""

from functools import partial

import pytest
import torch

from facts.calibration.decompositions import centred
from facts.decomposition.truncation import decompose
from facts.estimators.base import KroneckerFactors
from tests.networks import compress_on_all, image_batches, make_model

torch.manual_seed(0)
INPUTS = torch.randn(60, 7, dtype=torch.float64) * torch.rand(7, dtype=torch.float64) + torch.randn(7).double()
GRADS = torch.randn(60, 5, dtype=torch.float64)
WEIGHT = torch.randn(5, 7, dtype=torch.float64)


def with_one(inputs):
    return torch.cat([inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)], dim=1)


def test_the_change_of_weight_and_bias_is_the_best_of_its_rank():
    """The shift against least squares, the cost against the singular values that are left out."""
    weights = GRADS.square().sum(dim=1)
    whole = (with_one(INPUTS) * weights[:, None]).T @ with_one(INPUTS)
    decomposition = decompose(WEIGHT, centred(KroneckerFactors(A=whole), INPUTS.mean(dim=0)))
    left, right = decomposition.truncate(2)

    def cost(weight, shift):
        return (weights * ((INPUTS @ (WEIGHT - weight).T - shift).square().sum(dim=1))).sum()

    shift = (WEIGHT - left @ right) @ decomposition.mean
    least = cost(left @ right, shift)
    torch.testing.assert_close(least, decomposition.energies[2:].sum())
    root = weights.sqrt()[:, None]
    fitted = torch.linalg.lstsq(root, root * (INPUTS @ (WEIGHT - left @ right).T)).solution[0]
    torch.testing.assert_close(shift, fitted)


@pytest.mark.parametrize(("estimator", "form"), [("svd_llm", "plain"), ("asvd", "pivoted"), ("facts", "pivoted")])
def test_the_output_of_the_mean_is_kept(estimator, form):
    """Of the mean of all inputs, where that is what the method weighs them by; else of another one."""
    model, batches = make_model(), image_batches([8] * 8)
    result = compress_on_all(model, batches, fit_bias=True, estimator=estimator, search="uniform", form=form, ratio=0.4)
    inputs = {name: [] for name in result.plan}
    for name, seen in inputs.items():
        model.get_submodule(name).register_forward_pre_hook(partial(note, seen))
    with torch.no_grad():
        for images, _ in batches:
            model(images)
    for name, rank in result.plan.items():
        dense, small = (network.get_submodule(name) for network in (model, result.model))
        mean = torch.cat(inputs[name]).mean(0)
        if dense.bias is None:
            assert small.bias is None
        elif rank and estimator != "facts":
            torch.testing.assert_close(small(mean), dense(mean), rtol=1e-6, atol=1e-6)
        elif rank:
            assert not small.bias.equal(dense.bias)
    assert "biases fitted" in str(result)


def note(seen, module, args):
    if args[0].ndim > 1:
        seen.append(args[0].flatten(0, -2))
