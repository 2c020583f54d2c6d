"""Networks that can be pruned: plain and distilled vision transformers of timm."""

import re

from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

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


def token_parameters(model: VisionTransformer) -> list[nn.Parameter]:
    """Parameters added to the patches' embeddings or put beside them; the last axis is the embedding."""
    return [getattr(model, name) for name in TOKENS if getattr(model, name, None) is not None]


def note_embedding(model: VisionTransformer) -> None:
    """Update the attributes that hold the width of the embedding."""
    model.embed_dim = model.num_features = model.head_hidden_size = len(model.patch_embed.proj.weight)
