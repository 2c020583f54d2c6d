"""Random views of images, for a network that learns from another: both see the same view, so no label can be wrong."""

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_AREA = 0.5  # of a crop
ASPECT = 4 / 3  # of its sides, at most


def random_views(images: Tensor) -> Tensor:
    """Crop each image `[N, C, H, W]`, flip it with probability one half, and resize it bilinearly to the same size.

    In float32 at least: half precision has too few bits for positions.
    """
    exact = images.to(torch.promote_types(images.dtype, torch.float32))
    draws = torch.rand(5, len(exact), dtype=exact.dtype, device=exact.device)
    area, aspect = 1 - (1 - SMALLEST_AREA) * draws[0], ASPECT ** (2 * draws[1] - 1)
    width, height = ((area * by).sqrt().clamp(max=1) for by in (aspect, 1 / aspect))
    flip = 1 - 2 * (draws[2] < 0.5).to(exact)
    right, down = (1 - width) * (2 * draws[3] - 1), (1 - height) * (2 * draws[4] - 1)
    zero = torch.zeros_like(width)
    matrices = torch.stack([torch.stack([flip * width, zero, right], 1), torch.stack([zero, height, down], 1)], 1)
    grid = F.affine_grid(matrices, list(exact.shape), align_corners=False)
    return F.grid_sample(exact, grid, padding_mode="border", align_corners=False).to(images)


def are_photos(inputs: Tensor) -> bool:
    """Whether inputs are colour images `[N, 3, H, W]`."""
    return inputs.ndim == 4 and inputs.is_floating_point() and inputs.shape[1] == 3
