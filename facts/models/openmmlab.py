"""Networks of mmdetection and mmsegmentation: their recipe, their division into maps and heads, and their backbones."""

import copy
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import field_validator
from timm.layers import resample_abs_pos_embed
from timm.models import SwinTransformer, VisionTransformer
from torch import Tensor, nn

from facts.models.builders import Recipe, TimmModel, nested
from facts.modules.forms import PivotedLinear, pivoted_layer
from facts.modules.lowrank import LowRankLayer, LowRankLinear, linear_layer
from facts.utils.numerics import seeded
from facts.utils.options import options
from facts.utils.progress import silence

LAYERS = ("BN", "GELU", "GN", "LN", "ReLU", "SyncBN")  # any other name might make the library import something

# Patterns of timm's module names, and OpenMMLab's names.
Names = dict[str, str | Callable[[re.Match[str]], str]]
SHARED: Names = {
    r"patch_embed\.proj\b": "patch_embed.projection",
    r"mlp\.fc1": "ffn.layers.0.0",
    r"mlp\.fc2": "ffn.layers.1",
}
SWIN: Names = {
    **SHARED,
    r"layers\.(\d)\.downsample": lambda match: f"stages.{int(match[1]) - 1}.downsample",  # timm starts a stage with it
    r"layers\.(\d+)\.blocks": r"stages.\1.blocks",
    r"\.attn\.": ".attn.w_msa.",
    r"^norm\.": "norm3.",
}
VIT: Names = {**SHARED, r"blocks\.(\d+)\.": r"layers.\1.", r"norm([12])": r"ln\1"}


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
        self.qkv = linear_layer(inner.in_proj_weight, inner.in_proj_bias)
        self.proj = linear_layer(inner.out_proj.weight, inner.out_proj.bias)
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


@options
class OpenMMLabModel(Recipe):
    """A network, given by the name of a library's configuration, such as `swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py`.

    `arguments` change fields of its `model`, by dotted name: `{"backbone.embed_dims": 128}`. `weights` is a file of the
    library or of this package, or `random`. Training starts with the backbone of `classifier`.
    """

    kind: ClassVar[str] = "openmmlab"
    toolbox: Literal["mmdet", "mmseg"]
    config: str
    classifier: TimmModel | None = None

    @field_validator("config")
    @classmethod
    def _inside(cls, config: str) -> str:
        path = PurePosixPath(config)
        if path.is_absolute() or ".." in path.parts or "\\" in config or path.suffix != ".py":
            raise ValueError(f"{config!r} is not a file name among the library's configurations, which are code")
        return config

    @property
    def name(self) -> str:
        return f"{self.toolbox}/{self.config}"

    @property
    def repository(self) -> str:
        raise ValueError(f"the weights of {self.config} are not at Hugging Face: set weights to a file or `random`")

    def architecture(self) -> FeatureNetwork:
        device = torch.get_default_device()  # the libraries read tensor values while building, so not on `meta`
        with torch.device("cpu"):
            network = FeatureNetwork(library_network(self))
        from mmcv.cnn.bricks.transformer import MultiheadAttention  # installed, since the network was built

        for name, module in list(network.named_modules()):
            if isinstance(module, MultiheadAttention):
                network.set_submodule(name, SelfAttention(module))
            elif type(module).__name__ == "WindowMSA":  # each library has its own
                network.set_submodule(name, WindowAttention(module))
        return network.to(device)

    def portable(self) -> Self:
        return replace(super().portable(), classifier=None)

    def refuse_foreign(self) -> None:
        super().refuse_foreign()
        if self.classifier:
            raise ValueError("the recipe names a classifier to be loaded, which a saved network does not need")
        for path, value in nested(self.arguments):
            parts = path.split(".")
            foreign = [part for part in parts if part.startswith(("_", "init_cfg", "pretrained"))]
            if foreign or ("type" in parts and value not in LAYERS):
                found = f"the recipe's arguments set {(*foreign, 'type')[0]} to {value!r}"
                raise ValueError(f"{found}: they may only be sizes, and types among {', '.join(LAYERS)}")

    def renamed(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Move all but backbone and neck under `heads`, and rename attention's layers."""
        return {_renamed(name): tensor for name, tensor in tensors.items()}


def library_network(recipe: OpenMMLabModel) -> nn.Module:
    """Build the network with its library, with random weights. Raises `ImportError` without OpenMMLab's libraries."""
    try:
        importlib.import_module(f"{recipe.toolbox}.models")  # fills the registry
    except ImportError as error:
        raise ImportError(f"{recipe.toolbox} cannot be imported ({error}): make install-detection") from error
    from mmengine.config import Config
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import DefaultScope

    configurations = Path(importlib.import_module(recipe.toolbox).__path__[0], ".mim", "configs")
    config = Config.fromfile(configurations / recipe.config)
    config.merge_from_dict({f"model.{name}": value for name, value in recipe.arguments.items()})
    config.model.backbone.init_cfg = None  # no download
    if "pretrained" in config.model:
        config.model.pretrained = None
    with silence(), DefaultScope.overwrite_default_scope(recipe.toolbox):
        registry = importlib.import_module(f"{recipe.toolbox}.registry")
        network = revert_sync_batchnorm(registry.MODELS.build(config.model))
        network.init_weights()
    return network


def _renamed(name: str) -> str:
    if not name.startswith(("backbone.", "neck.", "heads.")):
        name = f"heads.{name}"
    return name.replace(".attn.attn.in_proj_", ".attn.qkv.").replace(".attn.attn.out_proj.", ".attn.proj.")


def transplant(classifier: nn.Module, network: FeatureNetwork) -> None:
    """Copy the weights of a timm network with the same shapes, low-rank layers included, into the backbone.

    Parts that only one of them has are left alone: the classifier's head, and norms of the backbone's extra maps.
    Position embeddings are resampled. Raises `ValueError` for another family or other shapes.
    """
    if not isinstance(classifier, SwinTransformer | VisionTransformer):
        raise ValueError(f"a {type(classifier).__name__} cannot be the backbone: give timm's Swin or a plain ViT")
    names, own = (SWIN, ("head.",)) if isinstance(classifier, SwinTransformer) else (VIT, ("head.", "norm."))
    backbone = network.backbone
    try:
        low_rank = {name: module for name, module in classifier.named_modules() if isinstance(module, LowRankLayer)}
        for name, module in low_rank.items():
            backbone.set_submodule(_in_openmmlab(name, names), _with_own_inputs(name, module))
        tensors = {
            _in_openmmlab(name, names): _rearranged(name, tensor)
            for name, tensor in classifier.state_dict().items()
            if not name.startswith((*own, *(f"{name}." for name in low_rank)))
        }
        if names is VIT:
            side = int((backbone.pos_embed.shape[1] - 1) ** 0.5)
            positions = resample_abs_pos_embed(tensors["pos_embed"], [side, side], num_prefix_tokens=1).clone()
            positions[:, 1:] += tensors.pop("patch_embed.projection.bias")  # mmsegmentation's projection has none
            tensors["pos_embed"] = positions
        unexpected = backbone.load_state_dict(tensors, strict=False).unexpected_keys
    except (AttributeError, RuntimeError) as error:
        message = f"the backbone {type(backbone).__name__} does not have its classifier's shapes: {error}"
        raise ValueError(message) from error
    if unexpected:
        raise ValueError(f"the backbone {type(backbone).__name__} has no place for {', '.join(unexpected)}")


def _in_openmmlab(name: str, names: Names) -> str:
    for pattern, replacement in names.items():
        name = re.sub(pattern, replacement, name)
    return name


def _rearranged(name: str, tensor: Tensor) -> Tensor:
    if "downsample" not in name:
        return tensor
    # timm orders the four pixels by column, row, channel; mmdet by channel, row, column.
    return tensor.unflatten(-1, (2, 2, -1)).transpose(-3, -1).flatten(-3)


def _with_own_inputs(name: str, layer: LowRankLayer) -> LowRankLayer:
    """Copy a layer, with its inputs in the backbone's order."""
    if "downsample" not in name:
        return copy.deepcopy(layer)
    left, right = layer.factors()
    make = pivoted_layer if isinstance(layer, PivotedLinear) else LowRankLinear
    return make(left, _rearranged(name, right), layer.bias)


def untrained(recipe: OpenMMLabModel, classifier: nn.Module, seed: int = 0) -> FeatureNetwork:
    """Build the recipe's network with the classifier's backbone, and heads with random weights."""
    with seeded(seed):
        network = recipe.architecture()
    transplant(classifier, network)
    network.recipe = recipe
    return network.eval()
