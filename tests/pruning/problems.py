"""Small vision transformers to prune."""

import timm
import torch

import facts
from facts.pruning import PruningProblem
from tests.networks import image_batches


def make_vit(model="deit_tiny_distilled_patch16_224", **arguments):
    """Two blocks with an embedding of 24, 3 heads of 8 dimensions and 48 hidden units."""
    torch.manual_seed(0)
    small = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2}
    return timm.create_model(model, **{**small, "num_classes": 4, **arguments}).eval()


def make_problem(model=None, ratio=0.6, cost="params", batches=None, **settings):
    batches = image_batches([8, 8], dtype=torch.float32) if batches is None else batches
    calibration = facts.prepare(model or make_vit(), batches, held_out=(), input_shape=(3, 8, 8), **settings)
    return PruningProblem(calibration, ratio, (3, 8, 8), cost)
