"""PyTorch's own attention and 1x1 convolutions, computed by linear layers."""

import itertools

import pytest
import torch
from torch import nn

import facts
from facts.modules import linear_calls
from facts.modules.linear_calls import LinearAttention, PointwiseConvolution
from tests.networks import make_model, relative_error, same_weights
from tests.refusals import refuses
from tests.toys import Net

N, T, S, HEADS, DIM = 3, 5, 7, 4, 24


def masks(kind, floating):
    truth = {
        "none": {},
        "tokens": {"attn_mask": torch.rand(T, S) < 0.3},
        "heads": {"attn_mask": torch.rand(N * HEADS, T, S) < 0.3},
        "keys": {"key_padding_mask": torch.arange(S).expand(N, S) >= torch.tensor([[7], [5], [3]])},
    }
    chosen = truth["tokens"] | truth["keys"] if kind == "both" else truth[kind]
    for mask in chosen.values():
        mask[..., 0] = False  # something is left to attend to
    if not floating:
        return chosen
    return {name: torch.zeros_like(mask, dtype=torch.float64).masked_fill(mask, -2.5) for name, mask in chosen.items()}


@pytest.mark.parametrize("kind", ["none", "tokens", "heads", "keys", "both"])
@pytest.mark.parametrize("floating", [False, True])
def test_computes_what_the_original_does(kind, floating):
    """Outputs and weights, whatever the layout, to rounding in float64."""
    for batch_first, bias, need_weights, average in itertools.product((False, True), repeat=4):
        original = nn.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=batch_first).double().eval()
        query, key, value = (torch.randn(N, size, DIM, dtype=torch.float64) for size in (T, S, S))
        inputs = [x if batch_first else x.transpose(0, 1) for x in (query, key, value)]
        options = {**masks(kind, floating), "need_weights": need_weights, "average_attn_weights": average}
        expected, actual = (module(*inputs, **options) for module in (original, LinearAttention(original)))
        assert relative_error(actual[0], expected[0]) < 1e-13 and (actual[1] is None) == (expected[1] is None)
        assert actual[1] is None or relative_error(actual[1], expected[1]) < 1e-13


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8}], ids=str)
def test_what_it_cannot_stand_for_stays(options):
    attention = nn.MultiheadAttention(DIM, HEADS, **options)
    assert not linear_calls.can_be_linear(attention)
    assert linear_calls.with_linear_layers(nn.Sequential(attention))[0] is attention


def through_convolutions(net, images):
    x = torch.relu(net.depthwise(torch.relu(net.expand(net.stem(images)))))
    x = torch.relu(net.grouped(torch.relu(net.strided(x))))
    return net.head(torch.relu(net.fc(x.mean(dim=(2, 3)))))


@pytest.fixture
def batches():
    return [(torch.randn(4, 3, 8, 8), torch.randint(4, (4,))) for _ in range(2)]


@pytest.mark.parametrize("stride", [1, 2, (2, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_computes_what_the_convolution_does(stride, bias):
    """To rounding in float64, on images of odd sizes; and the convolution comes back to the bit."""
    convolution = nn.Conv2d(5, 7, 1, stride=stride, bias=bias).double()
    images = torch.randn(2, 5, 9, 11, dtype=torch.float64)
    pointwise = PointwiseConvolution(convolution)
    assert relative_error(pointwise(images), convolution(images)) < 1e-14
    again = pointwise.convolution()
    assert again(images).equal(convolution(images)) and same_weights(again, convolution)


def test_only_by_choice(batches):
    layers = {"stem": nn.Conv2d(3, 12, 3, padding=1), "expand": nn.Conv2d(12, 24, 1)}
    layers |= {"depthwise": nn.Conv2d(24, 24, 3, padding=1, groups=24), "grouped": nn.Conv2d(16, 16, 1, groups=2)}
    layers |= {"strided": nn.Conv2d(24, 16, 1, stride=2, bias=False), "fc": nn.Linear(16, 20), "head": nn.Linear(20, 4)}
    model = Net(through_convolutions, **layers)
    pointwise = [name for name, module in model.named_modules() if linear_calls.is_pointwise(module)]
    assert pointwise == ["expand", "strided"]
    result = facts.compress(model, batches)
    assert list(result.plan) == ["fc"]
    reason = 'it is a 1x1 convolution: layers="all" takes it too'
    assert result.skipped == {"expand": reason, "strided": reason, "head": "its name holds `head`"}
    assert type(result.model.expand) is nn.Conv2d
    named = facts.compress(model, batches, layers=["strided", "fc"])
    assert list(named.plan) == ["strided.linear", "fc"]
    assert named.skipped == {"expand": "not among the layers named", "head": "not among the layers named"}


def test_taken_where_there_is_no_linear_layer(batches):
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 12, 1), nn.Flatten(), nn.LazyLinear(4))
    model(batches[0][0])
    assert list(facts.compress(model, batches).plan) == ["0.linear", "2.linear"]
    low_rank = facts.compress(make_model(), estimator="pela", ratio=0.5).model
    message = "are low-rank already: compress the original to a smaller budget"
    refuses(message, facts.compress, low_rank, estimator="pela", ratio=0.5)
    message = "Sequential has no layer to compress: 0: it is a 1x1 convolution"
    refuses(message, facts.compress, model, batches, layers="linear")
