"""Factorisations that succeed on every device, random draws that depend only on their seed, and standard errors."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from facts.utils.cache import content_key


def solved(solver: Callable[[Tensor], Any], matrix: Tensor) -> Any:
    """Return `solver(matrix)`, one tensor or several; from the CPU where a GPU's solver fails or returns NaN.

    Seen for matrices close to singular. Raises `torch.linalg.LinAlgError` if the CPU's result is not finite either.
    """
    try:
        found = solver(matrix)
        if all(tensor.isfinite().all() for tensor in tree_leaves(found)):
            return found
        raise torch.linalg.LinAlgError(f"{solver.__name__} found values that are not finite")
    except torch.linalg.LinAlgError:
        if not matrix.is_cuda:
            raise
    return tree_map(lambda tensor: tensor.to(matrix.device), solved(solver, matrix.cpu()))


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


def mean_and_error(sums: Tensor, sizes: Tensor) -> tuple[float, float | None]:
    """Mean over all members of groups `[N]` of these sizes, and its standard error over groups, None for one.

    The error is that of a ratio of two sums, to first order.
    """
    mean = sums.sum() / sizes.sum()
    if len(sizes) == 1:
        return mean.item(), None
    variance = (sums - mean * sizes).square().sum() * len(sizes) / (len(sizes) - 1)
    return mean.item(), (variance.sqrt() / sizes.sum()).item()


def jackknife_errors(
    compute: Callable[[list[Any]], Mapping[str, float]], samples: Sequence[Any], num_groups: int
) -> dict[str, float]:
    """Standard errors of what is computed from samples, from leaving out each of `num_groups` groups of them."""
    num_groups = min(num_groups, len(samples))
    if num_groups < 2:
        return {}
    kept = ([each for place, each in enumerate(samples) if place % num_groups != group] for group in range(num_groups))
    found = [compute(each) for each in kept]
    return {name: (num_groups - 1) ** 0.5 * float(np.std([each[name] for each in found])) for name in found[0]}
