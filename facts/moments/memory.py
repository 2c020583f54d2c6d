"""Policy for a device's memory: where moments accumulate, and what passes do if memory runs short."""

import math
from collections.abc import Iterable
from typing import Literal, TypeVar

import torch
from torch import nn

from facts.moments.checkpointing import blocks_of
from facts.utils.batches import gathered
from facts.utils.options import Count, options

T = TypeVar("T")

SHARE_OF_MOMENTS = 0.5  # of the free memory; the rest is for the passes


@options
class MemoryPolicy:
    """Placement of moments, number of layers at a time, and memory of a pass.

    `moments` are on the `device`, in main memory (`host`), or with `auto` on the device up to half of its free memory.
    With `halve_batches`, a pass that runs out of memory starts again with each batch in two parts, then in four, and so
    on; sums that a method defines per batch then cover smaller batches. With `checkpoint_blocks`, a pass with gradients
    recomputes the activations within blocks instead of keeping them, which takes a fifth longer; `auto` does so on a
    CPU. A data pass covers `layers_at_once` layers, which are decomposed before the next pass; None covers all.
    """

    moments: Literal["auto", "device", "host"] = "auto"
    halve_batches: bool = True
    checkpoint_blocks: bool | Literal["auto"] = False
    layers_at_once: Count | None = None

    def blocks(self, model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
        """The blocks that a pass with gradients runs twice. Raises `ValueError` if no layer is in a block."""
        if not self.checkpoint_blocks:
            return []
        layers = list(layers)
        by_itself = self.checkpoint_blocks == "auto"
        if by_itself and next(model.parameters()).device.type != "cpu":
            return []
        blocks = blocks_of(model, layers)
        if not blocks and not by_itself:
            raise ValueError(
                f"{type(model).__name__} has no blocks to checkpoint: none of its {len(layers)} layers is in an "
                "entry of an nn.ModuleList or nn.Sequential; leave MemoryPolicy(checkpoint_blocks=False)"
            )
        return blocks

    def groups(self, layers: Iterable[T]) -> list[list[T]]:
        """Divide the layers, in order, into groups whose moments are in memory at the same time."""
        layers = list(layers)
        size = self.layers_at_once or len(layers) or 1
        return [layers[start : start + size] for start in range(0, len(layers), size)]

    def room_for_moments(self, device: torch.device) -> float:
        """Bytes of the device that moments may take, the same in all processes."""
        free = math.inf
        if device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(device)[0]
        return min(gathered([self.room_of(free)]))

    def room_of(self, free: float) -> float:
        """Share of the free bytes that moments may take."""
        return {"host": 0, "auto": SHARE_OF_MOMENTS * free, "device": math.inf}[self.moments]


DEFAULT_POLICY = MemoryPolicy()
