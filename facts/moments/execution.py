"""Execution of passes over data: their precision, and their use of memory."""

from dataclasses import dataclass

import torch

from facts.moments.memory import DEFAULT_POLICY, MemoryPolicy


@dataclass(frozen=True)
class Execution:
    """Precision of passes, as the autocast type (float32 or bfloat16), and the policy for short memory."""

    precision: torch.dtype = torch.float32
    memory: MemoryPolicy = DEFAULT_POLICY

    def __post_init__(self) -> None:
        if not isinstance(self.precision, torch.dtype) or not self.precision.is_floating_point:
            raise ValueError(f"precision must be a type such as torch.bfloat16, got {self.precision!r}")


DEFAULT_EXECUTION = Execution()
