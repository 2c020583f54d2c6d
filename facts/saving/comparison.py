"""Checks of an exported network against the original: its outputs in float32, and its error in int8."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Call = Callable[[Tensor], Tensor]
TOLERANCE = 1e-4  # relative to the largest output
NUM_COMPARED = 32
USELESS = 1.0  # relative squared error of outputs that are all zero


def checked(model: nn.Module, exported: Call, example: Tensor, samples: list[Tensor]) -> float:
    """Return the error in int8 on the first samples `[1, ...]`; without samples, 0 after `compare`.

    Raises `ValueError` if the outputs are too far off.
    """
    if not samples:
        compare(model, exported, example)
        return 0.0
    error = _relative_error(model, exported, torch.cat(samples[:NUM_COMPARED]))
    if not error < USELESS:
        raise ValueError(
            f"in int8 the outputs of {type(model).__name__} are no better than zeros (relative squared error "
            f"{error:.3g}); nothing was written: export in float32, or give calibration data like the data in use"
        )
    return error


@torch.no_grad()
def compare(model: nn.Module, exported: Call, example: Tensor) -> None:
    """Raises `ValueError` if outputs are not one tensor, or differ by more than rounding on one of two batch sizes."""
    for batch in (example, torch.cat([example, example[:1]])):
        expected = model(batch)
        if not isinstance(expected, Tensor):
            raise ValueError(
                f"{type(model).__name__} returns a {type(expected).__name__}, but only a network that returns one "
                "tensor can be exported: wrap it in a module that picks one"
            )
        difference, allowed = (exported(batch) - expected).abs().max(), TOLERANCE * expected.abs().max()
        if not difference <= allowed:
            raise ValueError(
                f"outputs of the exported {type(model).__name__} differ from the network's by up to {difference:.3g} "
                f"on {len(batch)} inputs, but only {allowed:.3g} is allowed; nothing was written. Check `forward` for "
                "randomness or dependence on the batch size"
            )


@torch.no_grad()
def _relative_error(model: nn.Module, exported: Call, batch: Tensor) -> float:
    """‖changed - original‖² / ‖original‖², in float64."""
    original, changed = model(batch).double(), exported(batch).double()
    return ((changed - original).square().sum() / original.square().sum()).item()
