"""Low-rank layers of both forms and every layout, against the dense product."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from facts import LowRankLinear
from facts.modules.forms import FORMS, Pivoted, Plain, pivoted_layer
from tests.networks import relative_error

every_layout = pytest.mark.parametrize("layout", ("plain", "rows", "columns", "scattered rows", "scattered columns"))


def make_layer(layout="rows", dtype=torch.float64, bias=True):
    """A 7 x 5 layer of rank 3."""
    torch.manual_seed(0)
    layer = (Plain() if layout == "plain" else Pivoted(layout=layout)).empty(nn.Linear(5, 7, bias=bias, dtype=dtype), 3)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    if getattr(layer, "order", None) is not None:
        layer.order.copy_(torch.randperm(len(layer.order)))
    return layer


def factors(d_out=40, d_in=24, rank=10, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(d_out, rank, dtype=dtype), torch.randn(rank, d_in, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 5), (0, 5)])
@every_layout
def test_multiplies_by_its_weight_for_any_leading_shape(layout, shape, bias):
    layer = make_layer(layout, bias=bias)
    x = torch.randn(shape, dtype=torch.float64)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)


@every_layout
def test_reads_trains_and_loads_like_a_linear_layer(layout):
    layer, other = make_layer(layout), make_layer(layout, bias=True)
    form = FORMS["plain" if layout == "plain" else "pivoted"]()
    matrices = [parameter for parameter in layer.parameters() if parameter.ndim == 2]
    assert (layer.in_features, layer.out_features, layer.rank) == (5, 7, 3)
    assert layer.num_weights == form.num_weights(7, 5, 3) == sum(matrix.numel() for matrix in matrices)
    assert "in_features=5, out_features=7, rank=3, bias=True" in repr(layer)
    nn.init.zeros_(other.bias)
    other.load_state_dict(layer.state_dict(), strict=True)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert other(x).equal(layer(x))
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


@every_layout
def test_transforms_see_a_linear_layer(layout):
    layer, x = make_layer(layout), torch.randn(3, 4, 5, dtype=torch.float64)
    with torch.no_grad():
        expected = nn.functional.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(torch.vmap(layer)(x), expected)
        torch.testing.assert_close(torch.func.jvp(layer, (x,), (x,))[1], expected - layer.bias)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent
        torch.testing.assert_close(tangent, expected - layer.bias)
        traced = torch.fx.symbolic_trace(nn.Sequential(layer))
        torch.testing.assert_close(traced(x), expected)
    assert {name.removeprefix("0.") for name, _ in traced.named_parameters()} == dict(layer.named_parameters()).keys()


@pytest.mark.system
@every_layout
def test_compiles_without_a_graph_break(layout):
    layer, x = make_layer(layout), torch.randn(2, 4, 5, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


@pytest.mark.parametrize("make", [LowRankLinear, pivoted_layer])
def test_parameters_are_its_own_and_laid_out_as_in_a_loaded_file(make):
    """Training must not change the original's bias; outputs depend on the layout in their last bit."""
    bias = nn.Parameter(torch.ones(40, dtype=torch.float64))
    left, right = factors()
    layer = make(left.T.contiguous().T, right.T.contiguous().T, bias)
    layer.bias.data.zero_()
    assert bias.eq(1).all() and layer.bias.requires_grad
    assert all(parameter.is_contiguous() for parameter in layer.parameters())


@pytest.mark.parametrize(("d_out", "d_in"), [(40, 24), (24, 40), (24, 24)])
@pytest.mark.parametrize("rank", [1, 7, 23, 24])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_product_at_every_rank(d_out, d_in, rank, dtype):
    """In float32 to 1e-5, which a leading block of random factors meets or gives way to chosen pivots."""
    left, right = factors(d_out, d_in, rank, dtype)
    layer = pivoted_layer(left, right, torch.randn(d_out, dtype=dtype))
    assert (layer.out_features, layer.in_features, layer.rank) == (d_out, d_in, rank)
    exact = left.double() @ right.double()
    assert relative_error(layer.weight.double(), exact) < (1e-11 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_has_at_most_twice_the_error_of_plain_factors(dtype):
    left, right = factors(200, 120, 60)
    dense = nn.Linear(120, 200, dtype=dtype)
    layer, plain = (FORMS[name]().layer(dense, left, right) for name in ("pivoted", "plain"))
    assert layer.basis.dtype == plain.left.dtype == dtype
    assert layer.order is not None  # the leading block is not that accurate
    errors = [relative_error(each.weight.double(), left @ right) for each in (layer, plain)]
    assert errors[0] <= 2 * errors[1]


def test_autocast_asks_for_pivots_that_are_exact_in_its_type():
    left, right = factors(200, 120, 60)
    dense = nn.Linear(120, 200)
    full, half = (FORMS["pivoted"](dtype).layer(dense, left, right) for dtype in (torch.float32, torch.bfloat16))
    assert full.order is None and half.order is not None
    assert full.basis.dtype == half.basis.dtype == torch.float32
    vectors = torch.randn(64, 120)
    exact = vectors.double() @ right.T @ left.T + dense.bias.double()
    plain = FORMS["plain"]().layer(dense, left, right)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        errors = [relative_error(layer(vectors).double(), exact) for layer in (plain, full, half)]
    assert errors[2] <= 2 * errors[0] < errors[1]


@pytest.mark.parametrize("smallest", [0.0, 1e-20, 1e-9, 1e-4, None])
def test_dependent_rows_and_products_of_a_lower_rank(smallest):
    """Pivots give way to others where the leading ones, or all but six, are nothing or almost nothing."""
    left, right = factors()
    if smallest is None:
        left[:5], right[:, :5] = left[5:10], right[:, 5:10]
    else:
        left[:, 6:] *= smallest
    layer = pivoted_layer(left, right)
    assert relative_error(layer.weight, left @ right) < 1e-12
    assert smallest is not None or layer.order is not None
    assert layer.coefficients.isfinite().all()
    assert layer.coefficients.abs().max() < 1e3  # not inflated by what is almost nothing
    for zero in (pivoted_layer(left * 0, right), pivoted_layer(left * 0, right * 0)):
        assert zero.weight.eq(0).all()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_layer_is_laid_out_as_a_full_one(name, dtype):
    form, dense = FORMS[name](), nn.Linear(24, 40, dtype=dtype)
    empty, real = form.empty(dense, 10), form.layer(dense, *factors())
    assert type(empty) is type(real) and empty.num_weights == real.num_weights
    assert empty(torch.ones(2, 24, dtype=dtype)).isfinite().all()
    if name == "pivoted":
        assert (empty.order is None) == (real.order is None)
