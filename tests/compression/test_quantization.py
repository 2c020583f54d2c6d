"""Weights of eight and four bits: how far they lie from the original ones, and what is refused."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import facts
from facts.modules.pivots import pivoted_layer
from facts.modules.quantized import matrices, packed, quantization_of, quantized_weights
from tests.networks import relative_error

pytest.importorskip("torchao", reason="the extra `quantization` is not installed: pip install -e '.[quantization]'")

WEIGHTS = ("int8", "int4")
LARGEST = {"int8": 127.5, "int4": 7.5}  # half of the range of the integers


class Layers(nn.Module):
    """Each kind of layer once; widths are odd, and no multiples of a group."""

    def __init__(self):
        super().__init__()
        dense = nn.Linear(37, 21)
        left, right = torch.randn(21, 5), torch.randn(5, 37)
        self.dense = dense
        self.plain = facts.LowRankLinear(left, right, dense.bias)
        self.pivoted = pivoted_layer(left, right, dense.bias)
        self.norm = nn.LayerNorm(21)

    def forward(self, x):
        return self.norm(self.dense(x) + self.plain(x) + self.pivoted(x))


@pytest.fixture
def network():
    return Layers().eval()


def weight_of(network, name):
    layer, _, attribute = name.rpartition(".")
    return getattr(network.get_submodule(layer), attribute)


@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_move_by_half_a_step_of_their_group(network, weights, group_size):
    quantized = facts.quantize(network, weights, group_size=group_size).model
    size = group_size or {"int8": 1000, "int4": 32}[weights]
    for name in ("dense.weight", "plain.left", "plain.right"):
        original = network.get_parameter(name)
        for exact, rounded in zip(original.split(size, 1), weight_of(quantized, name).split(size, 1), strict=True):
            step = exact.abs().amax(1, keepdim=True) / LARGEST[weights]
            # the step is computed and multiplied in float32, on integers of up to 128
            assert ((rounded - exact).abs() <= step * (0.5 + 128 * 4 * torch.finfo(torch.float32).eps)).all()
            assert ((rounded / step) - (rounded / step).round()).abs().max() < 1e-4  # integers


def test_every_linear_layer_is_quantized_and_nothing_else(network):
    result = facts.quantize(network, "int8")
    assert set(quantized_weights(result.model)) == {
        *("dense.weight", "plain.left", "plain.right"),
        *("pivoted.basis", "pivoted.coefficients"),
    }
    assert set(dict(result.model.named_parameters())) == {
        *("dense.bias", "plain.bias", "pivoted.bias", "norm.weight", "norm.bias"),
    }
    assert result.plan == {} and "quantized: 5 weights in int8, one scale for each row" in repr(result)
    assert quantization_of(network) is None and set(matrices(network.dense)) == {"weight"}  # it is as it was


def test_all_pairs_of_four_bits_come_back():
    integers = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8).reshape(32, 16)[:, :15]
    layer = facts.quantize(nn.Sequential(nn.Linear(15, 32)), "int4", group_size=15).model[0]
    weight = layer.parametrizations.weight
    weight.original.copy_(packed(integers))
    weight[0].scales.fill_(1)
    assert layer.weight.equal(integers.float())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_pivoted_layers_lose_no_more_than_the_factors_of_an_svd(weights):
    """The first rows are nearly dependent: coefficients on them are large, and rounded as they are of no use."""
    left, right = torch.randn(60, 12, dtype=torch.float64), torch.randn(12, 40, dtype=torch.float64)
    left[:12] = left[:12, :1] @ left[:1] + 1e-3 * left[:12]
    coefficients = torch.linalg.solve(left[:12].T, left[12:].T).T
    layer = facts.PivotedLinear("rows", (left[:12] @ right).float(), coefficients.float())
    assert layer.coefficients.abs().max() > 100
    quantized = facts.quantize(nn.Sequential(layer), weights).model[0]
    u, s, vh = torch.linalg.svd(left @ right, full_matrices=False)
    plain = facts.LowRankLinear(u[:, :12].float(), (s[:12, None] * vh[:12]).float())
    rounded = facts.quantize(nn.Sequential(plain), weights).model[0].weight
    assert relative_error(quantized.weight, layer.weight) < 1.5 * relative_error(rounded, layer.weight)


def test_in_four_bits_a_pivoted_layer_is_two_factors_or_dense():
    network = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 100))
    result = facts.compress(network, estimator="pela", search="uniform", form="pivoted", ratio=0.8)
    assert result.plan == {"0": 22, "2": 28}
    quantized = facts.quantize(result, "int4")
    assert quantized.plan == {"0": None, "2": 28} and quantized.summary.form == "plain"
    assert quantized.summary.after == facts.Cost(None, 40 * 41 + 28 * 140 + 100)
    assert isinstance(quantized.model[0], nn.Linear) and isinstance(quantized.model[2], facts.LowRankLinear)
    assert facts.quantize(result, "int8").plan == result.plan
    summary = facts.quantize(result, "int8").summary
    assert replace(summary, sizes=result.summary.sizes) == result.summary
    before, after = summary.sizes
    assert (
        before == result.summary.sizes[0] and after.types.startswith("int8") and after.num_bytes < before.num_bytes / 3
    )


def test_a_weight_that_is_shared_stays():
    network = nn.ModuleDict({"tokens": nn.Embedding(9, 6), "hidden": nn.Linear(6, 6), "head": nn.Linear(6, 9)})
    network.head.weight = network.tokens.weight
    assert set(quantized_weights(facts.quantize(network).model)) == {"hidden.weight"}


def test_refusals(network, monkeypatch):
    unfit = copy.deepcopy(network)
    unfit.plain.left.data[0, 0] = torch.nan
    cases = (
        (network, {"weights": "int3"}, r"weights must be one of int8, int4, got 'int3'"),
        (network, {"group_size": 2.5}, "group_size must be an integer of at least 2, or None for the default, got 2.5"),
        (copy.deepcopy(network).double(), {}, r"only float32 can be quantized, but dense\.weight is torch\.float64"),
        (facts.quantize(network), {"weights": "int4"}, "is already quantized .5 weights in int8.*: quantize the net"),
        (nn.Sequential(nn.Linear(1, 4)), {}, "Sequential has no linear layer with a weight of its own"),
        (unfit, {}, r"plain\.left contains NaN or infinity: only finite weights can be quantized"),
    )
    for given, options, message in cases:
        with pytest.raises(ValueError, match=message):
            facts.quantize(given, **options)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ModuleNotFoundError, match=r"quantization needs torchao.*: pip install -e '\.\[quantization\]'"):
        facts.quantize(network)
