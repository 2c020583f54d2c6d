"""Detectors and segmenters as networks that make feature maps, with heads that read them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Features:
    """Maps `[N, C, H, W]` from fine to coarse, in float32, and the heads that make losses and predictions from them."""

    maps: tuple[Tensor, ...]
    heads: nn.Module

    def loss(self, samples: list[Any]) -> Tensor:
        """Add up the heads' losses on data samples of their library."""
        with self._float32():
            return self.heads.parse_losses(self.heads.loss(self.maps, samples))[0]

    def predictions(self, samples: list[Any]) -> list[Any]:
        """Predict boxes and masks, or a label map, at the size of the image on disk, as data samples."""
        with self._float32():
            return self.heads.predict(self.maps, samples)

    @cached_property
    def logits(self) -> Tensor:
        """Logits of a segmenter, `[N, classes, H, W]`."""
        with self._float32():
            return self.heads.decode_head(self.maps)

    def of_sample(self, number: int) -> "Features":
        return Features(tuple(level[number : number + 1] for level in self.maps), self.heads)

    def _float32(self) -> torch.autocast:
        # Not every device has the region operators in other types.
        return torch.autocast(self.maps[0].device.type, enabled=False)


class FeatureNetwork(nn.Module):
    """An OpenMMLab detector or segmenter, divided into `backbone`, `neck` and `heads`, which hold the rest.

    The heads are a network of the library that reads feature maps as its images, so all its methods still work.
    """

    recipe: Any  # the recipe that built it

    def __init__(self, network: nn.Module):
        super().__init__()
        self.backbone = network.backbone
        self.neck = network.neck if network.with_neck else nn.Identity()
        network.backbone = network.neck = nn.Identity()
        self.heads = network

    def forward(self, images: Tensor) -> Features:
        return Features(tuple(level.float() for level in self.neck(self.backbone(images))), self.heads)

    def whole_forward(self, images: Tensor) -> None:
        """Run every product for these images, so that it is counted; detectors use their maximum number of regions."""
        maps, heads = self(images).maps, self.heads
        if hasattr(heads, "decode_head"):
            heads.decode_head(maps)
            return
        heads.rpn_head(maps)
        roi_head, test = heads.roi_head, heads.test_cfg
        for extractor, head, count in (
            (roi_head.bbox_roi_extractor, roi_head.bbox_head, test.rpn.max_per_img),
            (roi_head.mask_roi_extractor, roi_head.mask_head, test.rcnn.max_per_img),
        ):
            size = extractor.roi_layers[0].output_size
            head(images.new_empty(count, extractor.out_channels, *size))


class SelfAttention(nn.Module):
    """mmcv's `MultiheadAttention` on tokens `[N, T, d]`, with two linear layers for its weights.

    mmcv calls PyTorch's, which bypasses the `forward` of its layers, so they cannot be captured or replaced.
    """

    def __init__(self, original: nn.Module):
        super().__init__()
        inner = original.attn
        self.num_heads, self.dropout = inner.num_heads, inner.dropout
        self.qkv = nn.Linear(inner.embed_dim, 3 * inner.embed_dim, bias=inner.in_proj_bias is not None)
        self.qkv.weight, self.qkv.bias = inner.in_proj_weight, inner.in_proj_bias
        self.proj = nn.Linear(inner.embed_dim, inner.embed_dim, bias=inner.out_proj.bias is not None)
        self.proj.weight, self.proj.bias = inner.out_proj.weight, inner.out_proj.bias
        self.proj_drop, self.dropout_layer = original.proj_drop, original.dropout_layer

    def forward(self, x: Tensor, identity: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return identity + self.dropout_layer(self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2))))


class WindowAttention(nn.Module):
    """OpenMMLab's `WindowMSA` on windows `[N·windows, T, d]`, with heads as wide as its layers make them.

    OpenMMLab takes the heads' width from the inputs, which is wrong for narrowed heads.
    """

    def __init__(self, original: nn.Module):
        super().__init__()
        self.num_heads, self.scale = original.num_heads, original.scale
        self.relative_position_bias_table = original.relative_position_bias_table
        self.register_buffer("relative_position_index", original.relative_position_index)
        self.qkv, self.proj = original.qkv, original.proj
        self.attn_drop, self.proj_drop = original.attn_drop, original.proj_drop

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        index = self.relative_position_index
        scores = self.scale * q @ k.mT + self.relative_position_bias_table[index].permute(2, 0, 1)
        if mask is not None:  # [windows, T, T]
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        mixed = self.attn_drop(scores.softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))
