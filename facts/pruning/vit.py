"""Networks that can be pruned, timm's plain and distilled vision transformers, and slicing of their parameters."""

import re

from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

TOKENS = ("cls_token", "dist_token", "reg_token", "pos_embed")
LAYERS = r"patch_embed\.proj|blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12])|norm|fc_norm|head|head_dist"
KNOWN_PARAMETERS = re.compile(rf"{'|'.join(TOKENS)}|({LAYERS})\.(weight|bias)")


def check_vit(model: nn.Module) -> VisionTransformer:
    """Return the network. Raises `ValueError` if it has parameters that would not be pruned with the others."""
    supported = (
        "pruning supports timm's plain and distilled vision transformers (vit_*, deit_*) without layer scale, norms "
        "in their attention, or attention pooling; "
    )
    if not isinstance(model, VisionTransformer):
        raise ValueError(f"{supported}this is a {type(model).__name__}")
    if unknown := [name for name, _ in model.named_parameters() if not KNOWN_PARAMETERS.fullmatch(name)]:
        raise ValueError(f"{supported}this one has {', '.join(unknown[:3])}")
    for name, block in model.blocks.named_children():
        if (type(block), type(block.attn), type(block.mlp)) != (Block, Attention, Mlp):
            raise ValueError(f"{supported}block {name} of this one was changed: prune the original network")
    return model


def slice_parameter(module: nn.Module, name: str, axis: int, kept: Tensor) -> None:
    """Keep the entries `kept` along one axis of a parameter, if the module has it."""
    if (parameter := getattr(module, name)) is not None:
        sliced = parameter.detach().index_select(axis, kept.to(parameter.device))
        setattr(module, name, nn.Parameter(sliced, requires_grad=parameter.requires_grad))


def update_sizes(model: nn.Module) -> None:
    """Set the size attributes of the layers and the network from their parameters' shapes."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Conv2d):
            module.out_channels = len(module.weight)
        elif isinstance(module, nn.LayerNorm):
            module.normalized_shape = tuple(module.weight.shape)
        elif isinstance(module, VisionTransformer):
            module.embed_dim = module.num_features = module.head_hidden_size = len(module.patch_embed.proj.weight)
