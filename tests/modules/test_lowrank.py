import shutil

import pytest
import torch
from torch import nn

from facts import LowRankLinear


def make_layer(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    return LowRankLinear(
        torch.randn(7, 3, dtype=dtype), torch.randn(3, 5, dtype=dtype), torch.randn(7, dtype=dtype) if bias else None
    )


def as_dense(layer):
    dense = nn.Linear(5, 7, bias=layer.bias is not None, dtype=layer.left.dtype)
    dense.weight.data = layer.left.data @ layer.right.data
    if layer.bias is not None:
        dense.bias.data = layer.bias.data.clone()
    return dense


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (2, 3, 4, 5), (0, 5)])
def test_equals_the_dense_product_for_any_leading_shape(shape, bias):
    layer = make_layer(bias=bias)
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(layer(x), as_dense(layer)(x))


def test_bias_is_its_own():
    """Training the compressed network must not change the original's bias."""
    bias = nn.Parameter(torch.ones(7))
    layer = LowRankLinear(torch.ones(7, 3), torch.ones(3, 5), bias)
    layer.bias.data.zero_()
    assert bias.eq(1).all()
    assert layer.bias.requires_grad


def test_layout_is_that_of_a_loaded_file():
    """The SVD's factors are stored by columns; parameters are not, or outputs would change in the last bit."""
    layer = LowRankLinear(torch.randn(3, 7).T, torch.randn(5, 3).T)
    assert layer.left.is_contiguous()
    assert layer.right.is_contiguous()


def test_ranks_must_agree():
    with pytest.raises(ValueError, match=r"left \[7, 3\] and right \[2, 5\] must share their rank"):
        LowRankLinear(torch.ones(7, 3), torch.ones(2, 5))


def test_gradients_reach_every_parameter():
    layer = make_layer()
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    dense = as_dense(layer)
    layer(x).square().sum().backward()
    dense(x.detach()).square().sum().backward()
    torch.testing.assert_close(layer.left.grad, dense.weight.grad @ layer.right.T)
    torch.testing.assert_close(layer.right.grad, layer.left.T @ dense.weight.grad)
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.mark.system
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_compiler)])
def test_compiles_without_a_graph_break(backend):
    layer = make_layer()
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
