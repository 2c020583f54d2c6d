"""Layers fitted to the outputs of the compressed ones before them."""

import copy

import pytest
import torch
from torch import nn

import facts
from experiments.rivals.refit.memvit import MemViTResidual
from experiments.rivals.refit.randomized_svd import RandomizedSVD
from experiments.rivals.refit.saes_svd import SAESSVD
from facts.calibration.prepare import prepare
from facts.refit import MPIFA, REFITS, Blockwise
from facts.refit.base import in_order
from tests.networks import compress_on_all, image_batches, make_model, make_swin, relative_error

OPTIONS = {"estimator": "svd_llm", "search": "uniform", "form": "plain", "ratio": 0.5}


@pytest.fixture
def chain():
    """Three layers with nonlinearities between them, in blocks, and inputs whose directions differ in strength."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(8, 4)).double()
    inputs = torch.randn(64, 8, dtype=torch.float64) * torch.linspace(0.2, 3, 8, dtype=torch.float64)
    return model, [(inputs[:40], torch.zeros(40, dtype=torch.int64)), (inputs[40:], torch.zeros(24, dtype=torch.int64))]


def inputs_of(model, batches, name):
    """What a layer sees, `[N, n]`."""
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        [model(inputs) for inputs, _ in batches]
    hook.remove()
    return torch.cat(seen)


def compressed_up_to(original, result, names):
    """The original with the compressed layers of some names."""
    model = copy.deepcopy(original)
    for name in names:
        model.set_submodule(name, result.model.get_submodule(name))
    return model


LAYERS = ["0.0", "1.0", "2.0"]


def test_the_update_of_svd_llm_is_least_squares_behind_compressed_layers(chain):
    """Against `lstsq` on the inputs themselves; right factors stay."""
    model, batches = chain
    plain, result = (
        compress_on_all(model, batches, layers=LAYERS, refit=refit, **OPTIONS) for refit in (None, "svd_llm")
    )
    for number, name in enumerate(LAYERS):
        x = inputs_of(compressed_up_to(model, result, LAYERS[:number]), batches, name)
        weight, (left, right) = model.get_submodule(name).weight.detach(), result.model.get_submodule(name).factors()
        torch.testing.assert_close(right, plain.model.get_submodule(name).factors()[1])
        expected = torch.linalg.lstsq(x @ right.T, x @ weight.T).solution.T
        torch.testing.assert_close(left.detach(), expected.detach())
        assert result.model.get_submodule(name).bias.equal(model.get_submodule(name).bias)


def test_mpifa_fits_both_factors_to_a_mixture(chain):
    """Its right factor is the best for its left one, by the gradient; its left one was for the first right one."""
    model, batches = chain
    refit, share = MPIFA(original_share=0.25, ridge=0.0), 0.25
    plain, result = (compress_on_all(model, batches, layers=LAYERS, refit=each, **OPTIONS) for each in (None, refit))
    for number, name in enumerate(LAYERS):
        x = inputs_of(compressed_up_to(model, result, LAYERS[:number]), batches, name)
        mixed = share * inputs_of(model, batches, name) + (1 - share) * x
        y = mixed @ model.get_submodule(name).weight.detach().T
        left, right = (factor.detach() for factor in result.model.get_submodule(name).factors())
        first = plain.model.get_submodule(name).factors()[1].detach()
        torch.testing.assert_close(left, torch.linalg.lstsq(x @ first.T, y).solution.T)
        right.requires_grad_()
        error = (y - x @ right.T @ left.T).square().sum()
        error.backward()
        assert right.grad.abs().max() < 1e-9 * y.square().sum()
        assert error <= (y - x @ first.T @ left.T).square().sum()


def test_blockwise_decomposes_in_the_metric_of_the_compressed_network(chain):
    """Each layer equals SVD-LLM's of the network whose earlier layers are compressed."""
    model, batches = chain
    result = compress_on_all(model, batches, layers=LAYERS, refit="blockwise", **OPTIONS)
    for number, name in enumerate(LAYERS):
        before = compressed_up_to(model, result, LAYERS[:number])
        alone = compress_on_all(before, batches, layers=[name], **OPTIONS)
        ours, theirs = (torch.matmul(*each.model.get_submodule(name).factors()) for each in (result, alone))
        assert relative_error(ours, theirs) < 1e-10


@pytest.mark.parametrize(
    "refit", [*(refit() for refit in REFITS.values()), MemViTResidual(), RandomizedSVD(), SAESSVD()], ids=repr
)
def test_ranks_and_cost_stay(refit):
    model, batches = make_swin(), image_batches([6, 4], shape=(3, 16, 16))
    options = {**OPTIONS, "form": "pivoted"}
    plain, result = (facts.compress(model, batches, refit=each, **options) for each in (None, refit))
    assert result.plan == plain.plan and result.summary.after == plain.summary.after
    assert f"refitted by {type(refit).__name__}" in str(result) and "refitted" not in str(plain)
    with torch.no_grad():
        outputs = [each.model(batches[0][0]) for each in (plain, result)]
    assert outputs[1].isfinite().all() and not outputs[0].equal(outputs[1])


def test_layers_are_taken_in_the_order_in_which_they_run():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))

        def forward(self, x):
            for block in reversed(self.blocks):
                x = block[0](torch.tanh(block[1](x)))
            return x

    model, batches = Backwards(), [(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64))]
    prepared = prepare(model, batches, held_out=(), layers=[f"blocks.{i}.{j}" for i in range(2) for j in range(2)])
    plan = dict.fromkeys(prepared.layers, 1)
    assert in_order(prepared, plan, by_block=False) == [["blocks.1.1"], ["blocks.1.0"], ["blocks.0.1"], ["blocks.0.0"]]
    plan["blocks.1.0"] = None
    names = [name for group in in_order(prepared, plan, by_block=True) for name in group]
    assert names == ["blocks.1.1", "blocks.0.1", "blocks.0.0"]


def test_what_a_refit_cannot_do():
    model, batches = make_model(), image_batches([4])
    with pytest.raises(ValueError, match="Blockwise runs the network on calibration data: give some, or no refit"):
        facts.compress(model, estimator="pela", refit="blockwise", ratio=0.5)
    with pytest.raises(ValueError, match="MPIFA does not fit biases: choose fit_bias=False"):
        facts.compress(facts.prepare(model, batches, fit_bias=True), refit="mpifa", ratio=0.5)
    with pytest.raises(ValueError, match="unknown refit 'gptq'; choose one of blockwise, mpifa, svd_llm"):
        facts.compress(model, batches, refit="gptq", ratio=0.5)


def test_blockwise_fits_biases(chain):
    model, batches = chain
    result = facts.compress(
        facts.prepare(model, batches, held_out=(), layers=LAYERS, fit_bias=True), refit=Blockwise(), **OPTIONS
    )
    for number, name in enumerate(LAYERS):
        x = inputs_of(compressed_up_to(model, result, LAYERS[:number]), batches, name).mean(0)
        torch.testing.assert_close(result.model.get_submodule(name)(x), model.get_submodule(name)(x))
