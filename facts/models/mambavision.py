"""MambaVision in plain PyTorch, with the names and shapes of the published checkpoints.

Written from the paper (Hatamizadeh and Kautz, "MambaVision: A Hybrid Mamba-Transformer Vision Backbone", CVPR 2025)
and from the checkpoints' tensors. Every linear layer sees its samples in the order of the batch.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, Mlp, trunc_normal_
from timm.models.swin_transformer import window_partition, window_reverse
from torch import Tensor, nn

try:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn as fused_scan
except ImportError:
    fused_scan = None

VARIANTS: dict[str, dict[str, Any]] = {
    "T": {"depths": (1, 3, 8, 4), "dims": (80, 160, 320, 640), "heads": (8, 16), "stem_dim": 32},
    "T2": {"depths": (1, 3, 11, 4), "dims": (80, 160, 320, 640), "heads": (8, 16), "stem_dim": 32},
    "S": {"depths": (3, 3, 7, 5), "dims": (96, 192, 384, 768), "heads": (8, 16)},
    "B": {"depths": (3, 3, 10, 5), "dims": (128, 256, 512, 1024), "heads": (8, 16), "layer_scale": 1e-5},
    "L": {"depths": (3, 3, 10, 5), "dims": (196, 392, 784, 1568), "heads": (16, 32), "layer_scale": 1e-5},
    "L2": {"depths": (3, 3, 12, 5), "dims": (196, 392, 784, 1568), "heads": (16, 32), "layer_scale": 1e-5},
}


class MambaVision(nn.Module):
    """A convolutional stem and two convolutional stages, then two stages of Mamba mixers followed by attention.

    `depths` and `dims` hold a value for each of the four stages, `heads` and `windows` for each of the last two. Images
    `[N, in_chans, H, W]` of any size give logits `[N, num_classes]`; `img_size` is only recorded.
    """

    def __init__(
        self,
        depths: Sequence[int],
        dims: Sequence[int],
        heads: Sequence[int],
        windows: Sequence[int] = (14, 7),
        stem_dim: int = 64,
        mlp_ratio: float = 4.0,
        layer_scale: float | None = None,
        img_size: int = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
    ):
        super().__init__()
        self.num_classes = num_classes
        self.pretrained_cfg = {
            "input_size": (in_chans, img_size, img_size),
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
            "interpolation": "bicubic",
            "crop_pct": 0.875,  # resize to 256 as for the other networks; the publishers themselves use 1.0 for B
        }
        self.patch_embed = stem(in_chans, stem_dim, dims[0])
        self.levels = nn.Sequential(
            ConvStage(depths[0], dims[0], dims[1]),
            ConvStage(depths[1], dims[1], dims[2]),
            TokenStage(depths[2], dims[2], dims[3], heads[0], windows[0], mlp_ratio, layer_scale),
            TokenStage(depths[3], dims[3], None, heads[1], windows[1], mlp_ratio, layer_scale),
        )
        self.norm = nn.BatchNorm2d(dims[-1])
        self.head = nn.Linear(dims[-1], num_classes)
        self.init_weights()

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, MambaMixer):
                module.init_step_size()

    def forward(self, x: Tensor) -> Tensor:
        maps = self.norm(self.levels(self.patch_embed(x)))  # [N, dims[-1], H / 32, W / 32]
        return self.head(maps.mean(dim=(2, 3)))


def stem(in_chans: int, stem_dim: int, dim: int) -> nn.Module:
    """Two strided convolutions: images `[N, in_chans, H, W]` to `[N, dim, H / 4, W / 4]`."""
    layers: list[nn.Module] = []
    for before, after in ((in_chans, stem_dim), (stem_dim, dim)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after, eps=1e-4)]
        layers += [nn.ReLU()]
    return nn.Sequential(OrderedDict(conv_down=nn.Sequential(*layers)))


def downsample(dim: int, out_dim: int) -> nn.Module:
    """A strided convolution: `[N, dim, H, W]` to `[N, out_dim, H / 2, W / 2]`."""
    return nn.Sequential(OrderedDict(reduction=nn.Sequential(nn.Conv2d(dim, out_dim, 3, 2, padding=1, bias=False))))


class ConvBlock(nn.Module):
    """A residual block of two 3 x 3 convolutions on `[N, dim, H, W]`."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(dim)
        self.act1 = nn.GELU(approximate="tanh")
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))


class ConvStage(nn.Module):
    """Convolutional blocks, then the downsampling: `[N, dim, H, W]` to `[N, out_dim, H / 2, W / 2]`."""

    def __init__(self, depth: int, dim: int, out_dim: int):
        super().__init__()
        self.blocks = nn.Sequential(*(ConvBlock(dim) for _ in range(depth)))
        self.downsample = downsample(dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.downsample(self.blocks(x))


class TokenStage(nn.Module):
    """Mixer blocks, then attention blocks, on square windows: `[N, dim, H, W]` to `[N, out_dim, H / 2, W / 2]`.

    Without `out_dim`, the shape does not change. Maps are padded with zeros to a whole number of windows.
    """

    def __init__(
        self,
        depth: int,
        dim: int,
        out_dim: int | None,
        heads: int,
        window: int,
        mlp_ratio: float,
        layer_scale: float | None,
    ):
        super().__init__()
        self.window = window, window
        self.blocks = nn.Sequential()
        for index in range(depth):
            first = index < (depth + 1) // 2
            mixer = MambaMixer(dim) if first else Attention(dim, num_heads=heads, qkv_bias=True)
            self.blocks.append(TokenBlock(mixer, dim, mlp_ratio, layer_scale))
        self.downsample = nn.Identity() if out_dim is None else downsample(dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        x = F.pad(x, (0, -width % self.window[1], 0, -height % self.window[0]))
        padded = x.shape[2:]
        tokens = self.blocks(window_partition(x.movedim(1, -1), self.window).flatten(1, 2))
        x = window_reverse(tokens.unflatten(1, self.window), self.window, *padded).movedim(-1, 1).contiguous()
        return self.downsample(x[:, :, :height, :width])


class TokenBlock(nn.Module):
    """A mixer of tokens and an MLP, each normalised, scaled and residual, on `[N, L, dim]`."""

    def __init__(self, mixer: nn.Module, dim: int, mlp_ratio: float, layer_scale: float | None):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.mixer = mixer
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_features=int(dim * mlp_ratio))
        self.gamma_1, self.gamma_2 = (
            1.0 if layer_scale is None else nn.Parameter(torch.full((dim,), layer_scale)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.mixer(self.norm1(x))
        return x + self.gamma_2 * self.mlp(self.norm2(x))


class MambaMixer(nn.Module):
    """MambaVision's mixer: half of the channels go through a selective scan, half only through a convolution.

    Maps tokens `[N, L, dim]` to the same shape. `x_proj` and `dt_proj` see `[N * L, features]`, image by image.
    """

    def __init__(self, dim: int, state_dim: int = 8):
        super().__init__()
        inner = dim // 2
        self.split = (math.ceil(dim / 16), state_dim, state_dim)
        self.A_log = nn.Parameter(torch.arange(1.0, state_dim + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv1d_x = nn.Conv1d(inner, inner, 3, padding="same", groups=inner, bias=False)
        self.conv1d_z = nn.Conv1d(inner, inner, 3, padding="same", groups=inner, bias=False)
        self.x_proj = nn.Linear(inner, sum(self.split), bias=False)
        self.dt_proj = nn.Linear(self.split[0], inner)
        self.scan = SelectiveScan()
        self.out_proj = nn.Linear(2 * inner, dim, bias=False)

    def init_step_size(self) -> None:
        """Draw step sizes log-uniformly from [0.001, 0.1], as Mamba does (Gu and Dao, 2023)."""
        bound = self.dt_proj.in_features**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        step = torch.empty_like(self.dt_proj.bias).uniform_(math.log(0.001), math.log(0.1)).exp()
        with torch.no_grad():
            # The inverse of softplus; halved, because the bias is added twice.
            self.dt_proj.bias.copy_((step + torch.log(-torch.expm1(-step))) / 2)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x, z = self.in_proj(tokens).transpose(1, 2).chunk(2, dim=1)
        x, z = F.silu(self.conv1d_x(x)), F.silu(self.conv1d_z(z))
        dt, B, C = self.x_proj(x.transpose(1, 2).flatten(0, 1)).split(self.split, dim=1)
        dt, B, C = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in (self.dt_proj(dt), B, C))
        # The published network adds the bias a second time, here.
        delta = F.softplus(dt + self.dt_proj.bias[:, None])
        y = self.scan(x, delta, -torch.exp(self.A_log), B, C, self.D)
        return self.out_proj(torch.cat([y, z], dim=1).transpose(1, 2))


class SelectiveScan(nn.Module):
    """The state-space recurrence h_l = exp(delta_l A) h_{l-1} + delta_l B_l x_l, y_l = C_l h_l + skip x_l.

    `x` and `delta` are `[N, D, L]`, `A` (negative) `[D, S]`, `B` and `C` `[N, S, L]`, `skip` `[D]`; gives `[N, D, L]`
    in the type of `x`, computed in at least float32. On CUDA, the fused kernel of `mamba_ssm` is used if installed.
    """

    def forward(self, x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        inputs = [tensor.to(dtype) for tensor in (x, delta, A, B, C, skip)]
        if fused_scan is not None and x.is_cuda and dtype == torch.float32:
            return fused_scan(*(tensor.contiguous() for tensor in inputs)).to(x.dtype)
        return parallel_scan(*inputs).to(x.dtype)


def parallel_scan(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor) -> Tensor:
    """`SelectiveScan` in about log2(L) steps of whole-tensor operations (Hillis and Steele, 1986)."""
    length = x.shape[2]
    # [N, D, L, S]: after each doubling, `state` sums up the last `reach` inputs, and `decay` is their joint decay.
    decay = torch.exp(delta.unsqueeze(3) * A.unsqueeze(1))
    state = (delta * x).unsqueeze(3) * B.transpose(1, 2).unsqueeze(1)
    reach = 1
    while reach < length:
        # No decay exceeds one, so their products cannot overflow.
        carried = decay[:, :, reach:] * state[:, :, :-reach]
        state = torch.cat([state[:, :, :reach], state[:, :, reach:] + carried], dim=2)
        decay = torch.cat([decay[:, :, :reach], decay[:, :, reach:] * decay[:, :, :-reach]], dim=2)
        reach *= 2
    return (state * C.transpose(1, 2).unsqueeze(1)).sum(3) + skip[:, None] * x
