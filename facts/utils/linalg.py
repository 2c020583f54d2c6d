"""Factorisations that succeed on every device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
