"""MambaVision: its published sizes, its scan against the literal recurrence, and its windows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from facts.models import MambaVision
from facts.models.mambavision import VARIANTS, MambaMixer, SelectiveScan

SIZES = {"depths": [1, 1, 3, 2], "dims": [8, 8, 16, 32], "heads": [2, 4], "windows": [4, 2], "stem_dim": 8}


# Published: 31.8, 35.1, 50.1, 97.7, 227.9 and 241.5 M; the last two are cut off, not rounded.
@pytest.mark.parametrize(
    ("variant", "expected"), [("T", 31.79), ("T2", 35.10), ("S", 50.14), ("B", 97.69), ("L", 227.96), ("L2", 241.55)]
)
def test_parameter_counts_are_the_published_ones(variant, expected):
    with torch.device("meta"):
        parameters = MambaVision(**VARIANTS[variant]).parameters()
    assert round(sum(parameter.numel() for parameter in parameters) / 1e6, 2) == expected


def scan_arguments(length, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    x, delta, A = normal(2, 6, length), F.softplus(normal(2, 6, length)), -torch.exp(normal(6, 4))
    return [tensor.requires_grad_() for tensor in (x, delta, A, normal(2, 4, length), normal(2, 4, length), normal(6))]


def sequential_scan(x, delta, A, B, C, skip):
    state = x.new_zeros(*x.shape[:2], A.shape[1])
    outputs = []
    for step in range(x.shape[2]):
        decay = torch.exp(delta[:, :, step, None] * A)
        state = decay * state + (delta[:, :, step] * x[:, :, step])[:, :, None] * B[:, None, :, step]
        outputs.append((state * C[:, None, :, step]).sum(2) + skip * x[:, :, step])
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 49])
def test_parallel_scan_is_the_sequential_recurrence(length):
    arguments = scan_arguments(length)
    parallel, sequential = SelectiveScan()(*arguments), sequential_scan(*arguments)
    torch.testing.assert_close(parallel, sequential, rtol=0, atol=1e-12)
    weights = torch.randn_like(parallel)
    sums = (parallel * weights).sum(), (sequential * weights).sum()
    ours, literal = (torch.autograd.grad(each, arguments, materialize_grads=True) for each in sums)
    torch.testing.assert_close(ours, literal, rtol=1e-12, atol=1e-12)


def test_tokens_of_a_window_see_one_another_alone():
    """Windows of 4 x 4 on a map of 8 x 8: a change in the last column reaches the right half of the map."""
    stage = MambaVision(**SIZES).eval().double().levels[2]
    stage.downsample = nn.Identity()
    maps = torch.randn(2, 16, 8, 8, dtype=torch.float64)
    changed = maps.clone()
    changed[1, :, :, 7] = torch.randn(16, 8, dtype=torch.float64)
    differs = (stage(maps) != stage(changed)).any(dim=1)
    assert not differs[0].any() and not differs[1, :, :4].any() and differs[1, :, 4:].all()


def test_the_step_bias_enters_twice():
    mixer = MambaMixer(32).double()
    nn.init.normal_(mixer.dt_proj.bias)
    projected, scanned = [], []
    mixer.x_proj.register_forward_hook(lambda module, inputs, output: projected.append(output))
    mixer.scan.register_forward_pre_hook(lambda module, inputs: scanned.append(inputs[1]))
    weight, bias = mixer.dt_proj.weight, mixer.dt_proj.bias
    mixer(torch.randn(3, 5, 32, dtype=torch.float64))
    assert projected[0].shape == (15, 2 + 8 + 8)
    delta = F.softplus(projected[0][:, :2] @ weight.T + 2 * bias)
    torch.testing.assert_close(scanned[0].transpose(1, 2).flatten(0, 1), delta)
