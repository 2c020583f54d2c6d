"""Policy for the memory of a device: where moments grow, and what passes do if it is short."""

import gc
import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import nn

from facts.moments.checkpointing import blocks_of
from facts.utils import distributed
from facts.utils.options import Count, options

log = logging.getLogger(__name__)

T = TypeVar("T")

SHARE_OF_MOMENTS = 0.5  # of the free memory; the rest is for the passes
MAX_PARTS = 64


@options
class MemoryPolicy:
    """Placement of moments, number of layers at a time, and memory of a pass.

    `moments` are on the `device`, in main memory (`host`), or with `auto` on the device until half of its free memory
    is taken. With `halve_batches`, a pass that runs out of memory starts again with each batch in two parts, then in
    four, and so on: sums over samples stay the same; sums that a method defines by batch are then over smaller batches.
    With `checkpoint_blocks` a data pass with gradients keeps no activations within the network's blocks: the backward
    pass computes them again, which takes a fifth longer; `auto` does so on a CPU, if the layers lie in blocks. One data
    pass takes `layers_at_once` layers, which are decomposed before the next pass; None takes all.
    """

    moments: Literal["auto", "device", "host"] = "auto"
    halve_batches: bool = True
    checkpoint_blocks: bool | Literal["auto"] = False
    layers_at_once: Count | None = None

    def blocks(self, model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
        """The blocks that a pass with gradients runs twice. Raises `ValueError` if the layers lie in none."""
        if not self.checkpoint_blocks:
            return []
        layers = list(layers)
        by_itself = self.checkpoint_blocks == "auto"
        if by_itself and next(model.parameters()).device.type != "cpu":
            return []
        blocks = blocks_of(model, layers)
        if not blocks and not by_itself:
            raise ValueError(
                f"{type(model).__name__} has no blocks to checkpoint: none of its {len(layers)} layers lies in an "
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
        return min(distributed.all_gather(self.room_of(free)))

    def room_of(self, free: float) -> float:
        """Share of the free bytes that moments may take."""
        return {"host": 0, "auto": SHARE_OF_MOMENTS * free, "device": math.inf}[self.moments]


DEFAULT_POLICY = MemoryPolicy()


def within_memory(run: Callable[[int], T], policy: MemoryPolicy) -> T:
    """Call `run(num_parts)` with whole batches, then in more and more parts until they fit the device's memory.

    Raises `MemoryError` that says how to need less.
    """
    num_parts = 1
    while True:
        try:
            return distributed.on_all_ranks(partial(run, num_parts))
        except torch.OutOfMemoryError as error:
            if not policy.halve_batches or num_parts == MAX_PARTS:
                raise MemoryError(
                    f"the device ran out of memory with batches in {num_parts} parts ({error}); lower the batch size, "
                    'give MemoryPolicy(moments="host") or MemoryPolicy(checkpoint_blocks=True), or let '
                    "MemoryPolicy(halve_batches=True) divide the batches"
                ) from error
        num_parts *= 2
        gc.collect()  # errors and their frames can refer to each other, and to tensors on the device
        torch.cuda.empty_cache()
        log.warning("out of memory: the pass starts again with each batch in %d parts", num_parts)
