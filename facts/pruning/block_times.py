"""Times of a transformer block at given widths: a table measured on this device."""

import copy
import itertools
from collections.abc import Mapping

import scipy
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils.benchmark import Timer

from facts.pruning.widths import BLOCK_WIDTHS, EMBEDDING, Width, widths_of, without

MIN_SECONDS = 0.02


class BlockTimes:
    """Seconds of the first block by its widths: measured at full and half widths, linear between and beyond."""

    def __init__(self, model: VisionTransformer, batch: int, tokens: int):
        single = copy.deepcopy(model)
        single.blocks = single.blocks[:1]
        widths = widths_of(single)
        axes = [(width.size // 2, width.size) for width in widths.values()]
        seconds = [_seconds(single, widths, sizes, batch, tokens) for sizes in itertools.product(*axes)]
        table = torch.tensor(seconds).view([2] * len(axes)).numpy()
        self.table = scipy.interpolate.RegularGridInterpolator(axes, table, bounds_error=False, fill_value=None)

    def savings(self, widths: Mapping[str, Width]) -> dict[str, float]:
        """Seconds that the whole network saves if one unit is removed, for each width."""
        saved = dict.fromkeys(widths, 0.0)
        for number in range((len(widths) - 1) // len(BLOCK_WIDTHS)):
            names = [EMBEDDING, *(f"blocks.{number}.{name}" for name in BLOCK_WIDTHS)]
            sizes = torch.tensor([widths[name].size for name in names])
            points = torch.cat([sizes[None], sizes - torch.eye(len(sizes), dtype=torch.long)])
            whole, *less = self.table(points.numpy()).tolist()
            for name, seconds in zip(names, less, strict=True):
                saved[name] += max(0.0, whole - seconds)  # measured times may be longer for less work
        return saved


@torch.no_grad()
def _seconds(
    model: VisionTransformer, widths: Mapping[str, Width], sizes: tuple[int, ...], batch: int, tokens: int
) -> float:
    kept = {
        name: torch.arange(width.size) < max(1, size)  # half of one unit is one unit
        for (name, width), size in zip(widths.items(), sizes, strict=True)
    }
    block: nn.Module = without(model, widths, kept).blocks[0]
    inputs = next(block.parameters()).new_ones(batch, tokens, max(1, sizes[0]))
    timer = Timer("block(inputs)", globals={"block": block, "inputs": inputs}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=MIN_SECONDS).median
