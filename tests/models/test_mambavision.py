import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from facts.models import MambaVision, MambaVisionModel
from facts.models.mambavision import MambaMixer, SelectiveScan, from_windows, to_windows

TINY = {
    "depths": [1, 1, 3, 2],
    "dims": [8, 8, 16, 32],
    "heads": [2, 4],
    "windows": [4, 2],
    "stem_dim": 8,
    "in_chans": 1,
    "num_classes": 5,
}


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return MambaVision.from_variant("T", **TINY).eval()


def batch_norm(name, width):
    shapes = {f"{name}.{key}": (width,) for key in ("weight", "bias", "running_mean", "running_var")}
    return {**shapes, f"{name}.num_batches_tracked": ()}


def linear(name, width_in, width_out, bias=True):
    shapes = {f"{name}.weight": (width_out, width_in)}
    return {**shapes, f"{name}.bias": (width_out,)} if bias else shapes


def mixer(name, dim):
    inner, rank = dim // 2, dim // 16
    return {
        f"{name}.A_log": (inner, 8),
        f"{name}.D": (inner,),
        f"{name}.conv1d_x.weight": (inner, 1, 3),
        f"{name}.conv1d_z.weight": (inner, 1, 3),
        **linear(f"{name}.in_proj", dim, dim, bias=False),
        **linear(f"{name}.x_proj", inner, rank + 16, bias=False),
        **linear(f"{name}.dt_proj", rank, inner),
        **linear(f"{name}.out_proj", dim, dim, bias=False),
    }


def attention(name, dim):
    return {**linear(f"{name}.qkv", dim, 3 * dim), **linear(f"{name}.proj", dim, dim)}


def published_base_shapes():
    """Names and shapes of NVIDIA's MambaVision-B checkpoint."""
    shapes = {
        "patch_embed.conv_down.0.weight": (64, 3, 3, 3),
        **batch_norm("patch_embed.conv_down.1", 64),
        "patch_embed.conv_down.3.weight": (128, 64, 3, 3),
        **batch_norm("patch_embed.conv_down.4", 128),
        **batch_norm("norm", 1024),
        **linear("head", 1024, 1000),
    }
    for level, dim in enumerate((128, 256, 512)):
        shapes[f"levels.{level}.downsample.reduction.0.weight"] = (2 * dim, dim, 3, 3)
    for level, dim in enumerate((128, 256)):
        for block in (f"levels.{level}.blocks.{index}" for index in range(3)):
            for index in (1, 2):
                shapes |= {f"{block}.conv{index}.weight": (dim, dim, 3, 3), f"{block}.conv{index}.bias": (dim,)}
                shapes |= batch_norm(f"{block}.norm{index}", dim)
    for level, dim, depth, mixers in ((2, 512, 10, 5), (3, 1024, 5, 3)):
        for index in range(depth):
            block = f"levels.{level}.blocks.{index}"
            shapes |= (mixer if index < mixers else attention)(f"{block}.mixer", dim)
            shapes |= linear(f"{block}.mlp.fc1", dim, 4 * dim) | linear(f"{block}.mlp.fc2", 4 * dim, dim)
            for key in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "gamma_1", "gamma_2"):
                shapes[f"{block}.{key}"] = (dim,)
    return shapes


def millions(model):
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def test_base_has_the_published_names_and_shapes():
    with torch.device("meta"):
        model = MambaVision.from_variant("B")
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == published_base_shapes()
    assert round(millions(model), 2) == 97.69


# Published: 31.8, 35.1, 50.1, 227.9 and 241.5 M; the last two are cut off, not rounded.
@pytest.mark.parametrize(
    ("variant", "expected"), [("T", 31.79), ("T2", 35.10), ("S", 50.14), ("L", 227.96), ("L2", 241.55)]
)
def test_parameter_counts_of_the_other_variants(variant, expected):
    with torch.device("meta"):
        assert round(millions(MambaVision.from_variant(variant)), 2) == expected


def test_runs_on_the_meta_device():
    with torch.device("meta"):
        model = MambaVision.from_variant("B").eval()
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


def test_unknown_variant_says_what_is_allowed():
    with pytest.raises(ValueError, match=r"'XL'.*T, T2, S, B, L, L2"):
        MambaVision.from_variant("XL")


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
    for ours, literal in zip(
        torch.autograd.grad((parallel * weights).sum(), arguments, materialize_grads=True),
        torch.autograd.grad((sequential * weights).sum(), arguments, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, literal, rtol=1e-12, atol=1e-12)


def test_scan_stays_finite_where_decays_vanish():
    x, delta, A, B, C, skip = scan_arguments(64)
    arguments = [x, delta * 1e4, A, B, C, skip]
    torch.testing.assert_close(SelectiveScan()(*arguments), sequential_scan(*arguments))


def test_scan_computes_half_precision_in_float32():
    arguments = [tensor.detach().bfloat16() for tensor in scan_arguments(33)]
    expected = sequential_scan(*(tensor.float() for tensor in arguments))
    output = SelectiveScan()(*arguments)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected.bfloat16())


def test_autocast_gives_nearly_the_same_logits(tiny):
    images = torch.randn(2, 1, 64, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = tiny(images)
    torch.testing.assert_close(logits.float(), tiny(images), rtol=0.05, atol=0.05)


def test_windows_are_batch_major_and_invertible():
    maps = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    windows = to_windows(maps, 2)
    assert windows.shape == (12, 4, 3)
    torch.testing.assert_close(windows[7].T.reshape(3, 2, 2), maps[1, :, :2, 2:4])
    torch.testing.assert_close(from_windows(windows, 2, 4, 6), maps)


@pytest.mark.parametrize("size", [(64, 64), (72, 40), (33, 97)])
def test_any_resolution_runs_and_gives_gradients(tiny, size):
    logits = tiny(torch.randn(2, 1, *size))
    assert logits.shape == (2, 5)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in tiny.parameters())


def test_an_image_does_not_depend_on_its_batch(tiny):
    images = torch.randn(4, 1, 72, 40, dtype=torch.float64)
    tiny = tiny.double()
    torch.testing.assert_close(tiny(images), torch.cat([tiny(images[:1]), tiny(images[1:])]), rtol=0, atol=1e-13)


@pytest.mark.parametrize("suffix", ["safetensors", "pth.tar"])
def test_checkpoints_load_strictly(tiny, tmp_path, suffix):
    path = tmp_path / f"tiny.{suffix}"
    if suffix == "safetensors":
        save_file(tiny.state_dict(), path)
    else:
        torch.save({"state_dict": tiny.state_dict()}, path)
    loaded = MambaVisionModel(variant="T", weights=str(path), arguments=TINY).build()
    images = torch.randn(2, 1, 64, 64)
    torch.testing.assert_close(loaded(images), tiny(images), rtol=0, atol=0)


class LowRank(nn.Module):
    """A factorised linear layer as compression makes it: two factors and the bias of the original."""

    def __init__(self, layer):
        super().__init__()
        self.down = nn.Linear(layer.in_features, layer.in_features, bias=False)
        self.up = nn.Linear(layer.in_features, layer.out_features, bias=False)
        self.bias = layer.bias
        with torch.no_grad():
            self.down.weight.copy_(torch.eye(layer.in_features))
            self.up.weight.copy_(layer.weight)

    def forward(self, x):
        return self.up(self.down(x)) + self.bias


@pytest.mark.parametrize("factorised", [False, True])
def test_the_step_bias_enters_twice(factorised):
    torch.manual_seed(0)
    mixer = MambaMixer(32).double()
    nn.init.normal_(mixer.dt_proj.bias)
    projected, scanned = [], []
    mixer.x_proj.register_forward_hook(lambda module, inputs, output: projected.append(output))
    mixer.scan.register_forward_pre_hook(lambda module, inputs: scanned.append(inputs[1]))
    weight, bias = mixer.dt_proj.weight, mixer.dt_proj.bias
    if factorised:
        mixer.dt_proj = LowRank(mixer.dt_proj).double()
    mixer(torch.randn(3, 5, 32, dtype=torch.float64))
    assert projected[0].shape == (15, 2 + 8 + 8)
    delta = F.softplus(projected[0][:, :2] @ weight.T + 2 * bias)
    torch.testing.assert_close(scanned[0].transpose(1, 2).flatten(0, 1), delta)


def test_compiled_scan_is_the_eager_one():
    arguments = [tensor.detach() for tensor in scan_arguments(9, torch.float32)]
    compiled = torch.compile(SelectiveScan(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), SelectiveScan()(*arguments))
