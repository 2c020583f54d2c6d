"""Small vision transformers whose tokens merge, and their data."""

import timm
import torch
from torch import nn

from tests.networks import image_batches

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
SMALL = {"img_size": 64, "depth": 3, "embed_dim": 48, "num_heads": 3, "num_classes": 10}


def vit(tag="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    return spread(timm.create_model(tag, **SMALL | options))


def spread(model):
    """Weights large enough that tokens and blocks matter."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.2)
    return model.double().eval()


def batches(shape=(3, 64, 64)):
    return [(x.double(), y) for x, y in image_batches([8, 8, 8], shape=shape)]
