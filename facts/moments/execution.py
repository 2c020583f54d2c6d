"""Execution of passes over data: their precision, and their use of memory."""

from dataclasses import dataclass

import torch

from facts.moments.memory import DEFAULT_POLICY, MemoryPolicy


@dataclass(frozen=True)
class Execution:
    """Precision of passes, as the autocast type (float32 or bfloat16), and the policy for short memory."""

    precision: torch.dtype = torch.float32
    memory: MemoryPolicy = DEFAULT_POLICY


DEFAULT_EXECUTION = Execution()
