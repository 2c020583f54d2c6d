"""Random draws that depend only on their seed."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from facts.utils.cache import content_key


def seed_of(*parts: Any) -> int:
    """Derive a 32-bit seed from all parts."""
    return int(content_key(*parts), base=16) % 2**32


@contextmanager
def seeded(*parts: Any, device: torch.device | None = None) -> Iterator[None]:
    """Seed Python, NumPy and torch from `parts` within the block; restore their states afterwards.

    `device` is the GPU on which torch draws, if any.
    """
    seed, states = seed_of(*parts), (random.getstate(), np.random.get_state())
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
