"""How data passes run: precision, memory, timing, and a cache of their results."""

from dataclasses import dataclass
from pathlib import Path

import torch

from facts.cost.timing import DEFAULT_TIMING, TimingPolicy
from facts.moments.collect import DEFAULT_POLICY, MemoryPolicy


@dataclass(frozen=True)
class Execution:
    """Settings of all data passes.

    `precision` is the autocast type (float32 or bfloat16), `memory` the policy for when device memory is short,
    `timing` the length of a latency measurement. `cache` is a folder for moments, decompositions and sensitivity
    profiles: a second run on the same network and data reads them. Without `cache_errors` it holds no profiles, so that
    a search can be timed.
    """

    precision: torch.dtype = torch.float32
    memory: MemoryPolicy = DEFAULT_POLICY
    timing: TimingPolicy = DEFAULT_TIMING
    cache: Path | str | None = None
    cache_errors: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.precision, torch.dtype) or not self.precision.is_floating_point:
            raise ValueError(f"precision must be a type such as torch.bfloat16, got {self.precision!r}")


DEFAULT_EXECUTION = Execution()
