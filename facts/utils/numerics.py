"""Factorisations that succeed on every device, and random draws that depend only on their seed."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from facts.utils.cache import content_key


def solved(solver: Callable[[Tensor], Any], matrix: Tensor) -> Any:
    """Return `solver(matrix)`, one tensor or several; from the CPU where a GPU's solver fails or returns NaN.

    Seen for matrices close to singular. Raises `torch.linalg.LinAlgError` if the CPU's result is not finite either.
    """
    try:
        found = solver(matrix)
        if all(tensor.isfinite().all() for tensor in ([found] if isinstance(found, Tensor) else found)):
            return found
        raise torch.linalg.LinAlgError(f"{solver.__name__} found values that are not finite")
    except torch.linalg.LinAlgError:
        if not matrix.is_cuda:
            raise
    found = solved(solver, matrix.cpu())
    return found.to(matrix.device) if isinstance(found, Tensor) else [each.to(matrix.device) for each in found]


def seed_of(*parts: Any) -> int:
    """Derive a 32-bit seed from all parts."""
    return int(content_key(*parts), base=16) % 2**32


def shuffled(count: int, seed: int) -> Tensor:
    """The numbers below `count` in an order that depends only on the seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


@contextmanager
def seeded(*parts: Any, device: torch.device | None = None) -> Iterator[None]:
    """Seed Python, NumPy and torch, also on a GPU `device`, within the block; restore their states afterwards."""
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
