import shutil

import pytest
import torch
from torch import nn

from facts import LowRankLinear, PivotedLinear
from facts.modules.forms import FORMS
from facts.modules.pivots import pivoted_layer
from tests.networks import relative_error

LAYOUTS = ("rows", "columns", "scattered rows", "scattered columns")


def make_layer(layout="rows", dtype=torch.float64, bias=True):
    """A 7 x 5 layer of rank 3."""
    torch.manual_seed(0)
    dense = nn.Linear(5, 7, bias=bias, dtype=dtype)
    layer = PivotedLinear.empty(dense, 3, layout)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    if layer.order is not None:
        layer.order.copy_(torch.randperm(len(layer.order)))
    return layer


def factors(d_out=40, d_in=24, rank=10, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(d_out, rank, dtype=dtype), torch.randn(rank, d_in, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (2, 3, 4, 5), (0, 5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_multiplies_by_its_weight_for_any_leading_shape(layout, shape, bias):
    layer = make_layer(layout, bias=bias)
    x = torch.randn(shape, dtype=torch.float64)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_is_made_of_pivots_and_combinations_of_them(layout):
    """Row by row: the pivots are the basis, every other is a sum of them."""
    layer = make_layer(layout)
    weight, basis, coefficients = layer.weight, layer.basis, layer.coefficients
    if layout.endswith("columns"):
        weight, basis, coefficients = weight.T, basis.T, coefficients.T
    order = torch.arange(len(weight)) if layer.order is None else layer.order
    places = order if layout.endswith("columns") else order.argsort()
    for row in range(3):
        assert weight[places[row]].equal(basis[row])
    for row in range(3, len(weight)):
        combination = sum(coefficients[row - 3, pivot] * basis[pivot] for pivot in range(3))
        torch.testing.assert_close(weight[places[row]], combination)


def test_reads_like_a_linear_layer():
    layer = make_layer("scattered rows")
    assert (layer.in_features, layer.out_features, layer.rank, layer.num_weights) == (5, 7, 3, 3 * (7 + 5 - 3))
    assert layer.num_weights == layer.basis.numel() + layer.coefficients.numel()
    assert sorted(dict(layer.named_parameters())) == ["basis", "bias", "coefficients"]
    assert sorted(layer.state_dict()) == ["basis", "bias", "coefficients", "order"]
    assert repr(layer) == "PivotedLinear(in_features=5, out_features=7, rank=3, bias=True, pivots=scattered rows)"


@pytest.mark.parametrize(("d_out", "d_in"), [(40, 24), (24, 40), (24, 24)])
@pytest.mark.parametrize("rank", [1, 7, 23, 24])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_product_at_every_rank(d_out, d_in, rank, dtype):
    """In float32 to 1e-5, which a leading block of random factors meets or gives way to chosen pivots."""
    left, right = factors(d_out, d_in, rank, dtype)
    layer = pivoted_layer(left, right, torch.randn(d_out, dtype=dtype))
    assert (layer.out_features, layer.in_features, layer.rank) == (d_out, d_in, rank)
    assert layer.num_weights == FORMS["pivoted"].num_weights(d_out, d_in, rank)
    exact = left.double() @ right.double()
    assert relative_error(layer.weight.double(), exact) < (1e-11 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_has_at_most_twice_the_error_of_plain_factors(dtype):
    left, right = factors(200, 120, 60)
    dense = nn.Linear(120, 200, dtype=dtype)
    layer, plain = (FORMS[name].layer(dense, left, right) for name in ("pivoted", "plain"))
    assert layer.basis.dtype == plain.left.dtype == dtype
    assert layer.order is not None  # the leading block is not that accurate
    errors = [relative_error(each.weight.double(), left @ right) for each in (layer, plain)]
    assert errors[0] <= 2 * errors[1]


def test_autocast_asks_for_pivots_that_are_exact_in_its_type():
    left, right = factors(200, 120, 60)
    dense = nn.Linear(120, 200)
    layers = {
        precision: FORMS["pivoted"].layer(dense, left, right, precision)
        for precision in (torch.float32, torch.bfloat16)
    }
    assert {precision: layer.order is None for precision, layer in layers.items()} == {
        torch.float32: True,
        torch.bfloat16: False,
    }
    assert all(layer.basis.dtype == torch.float32 for layer in layers.values())
    vectors = torch.randn(64, 120)
    exact = vectors.double() @ right.T @ left.T + dense.bias.double()
    plain = FORMS["plain"].layer(dense, left, right)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        errors = [relative_error(layer(vectors).double(), exact) for layer in (plain, *layers.values())]
    assert errors[2] <= 2 * errors[0] < errors[1]


def test_dependent_leading_rows_and_columns_give_way_to_others():
    left, right = factors()
    left[:5], right[:, :5] = left[5:10], right[:, 5:10]
    layer = pivoted_layer(left, right)
    assert layer.order is not None
    assert relative_error(layer.weight, left @ right) < 1e-12


@pytest.mark.parametrize("smallest", [0.0, 1e-20, 1e-9, 1e-4])
def test_products_of_a_lower_rank(smallest):
    """Components that are nothing, or next to nothing, beside the others."""
    left, right = factors()
    left[:, 6:] *= smallest
    layer = pivoted_layer(left, right)
    assert relative_error(layer.weight, left @ right) < 1e-12
    assert layer.coefficients.isfinite().all()
    assert layer.coefficients.abs().max() < 1e3  # not inflated by what is next to nothing


def test_factors_of_very_different_sizes():
    """As undoing a root of a factor leaves them: pivots are chosen by the product."""
    left, right = factors(dtype=torch.float32)
    scale = torch.logspace(-4, 4, 10)
    layer = pivoted_layer(left * scale, right / scale[:, None])
    assert relative_error(layer.weight.double(), left.double() @ right.double()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_factors_beyond_the_range_of_half_precision(dtype):
    """Pivots are judged by digits: TensorFloat-32 has those of float16 but not its range."""
    left, right = factors(60, 60, 30)
    left[:5], right[:, :5] = left[5:10], right[:, 5:10]  # the leading ones will not do
    layer = pivoted_layer(left * 1e6, right * 1e-6, dtype=dtype, arithmetic=torch.float16)
    assert layer.order is not None
    assert relative_error(layer.weight.double(), left @ right) < 0.01


@pytest.mark.parametrize("side", ["row", "rows"])
def test_sides_and_ranks_are_checked(side):
    with pytest.raises(ValueError, match=r"side must be rows or columns, got 'rows?', and basis \[3, 5\] and coeff"):
        PivotedLinear(side, torch.ones(3, 5), torch.ones(4, 3 if side == "row" else 2))


def test_a_weight_of_zeros():
    left, right = factors()
    layer = pivoted_layer(left * 0, right)
    assert layer.weight.eq(0).all()


def test_bias_is_its_own():
    """Training the compressed network must not change the original's bias."""
    bias = nn.Parameter(torch.ones(40, dtype=torch.float64))
    layer = pivoted_layer(*factors(), bias)
    layer.bias.data.zero_()
    assert bias.eq(1).all()
    assert layer.bias.requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_dict_round_trip(layout):
    layer, other = make_layer(layout), PivotedLinear.empty(nn.Linear(5, 7, dtype=torch.float64), 3, layout)
    other.load_state_dict(layer.state_dict(), strict=True)
    x = torch.randn(2, 5, dtype=torch.float64)
    assert other(x).equal(layer(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_reach_every_parameter(layout):
    layer = make_layer(layout)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autocast(layout):
    layer = make_layer(layout, torch.float32)
    x = torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        output = layer(x)
    assert output.dtype == torch.bfloat16
    assert relative_error(output.float(), layer(x)) < 0.02  # some roundings of 0.4 % each


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_compiler)])
def test_compiles_without_a_graph_break(backend, layout):
    layer = make_layer(layout)
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stand_in_for_timing_is_laid_out_as_a_layer(name, dtype):
    form, dense = FORMS[name], nn.Linear(24, 40, dtype=dtype)
    stand_in = form.stand_in(dense, 10)
    assert stand_in.num_weights == form.num_weights(40, 24, 10)
    assert isinstance(stand_in, LowRankLinear if name == "plain" else PivotedLinear)
    assert stand_in(torch.ones(2, 24, dtype=dtype)).isfinite().all()
    if name == "pivoted":
        real = form.layer(dense, *factors())
        assert (stand_in.order is None) == (real.order is None)
