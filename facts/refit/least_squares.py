"""Closed-form factors of a low-rank layer that fit its outputs best, in float64.

Legend: m = d_out, n = d_in, k = rank; x the inputs of a layer in the original network, x̃ those in the network whose
earlier layers are compressed, y the outputs to fit; `target [m, n]` = Σ y x̃ᵀ and `gram [n, n]` = Σ x̃ x̃ᵀ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from facts.estimators.whitening import NEAR_SINGULAR
from facts.modules.modes import autocast
from facts.modules.networks import run
from facts.moments.batch import at_least_float32
from facts.moments.capture import capturing
from facts.refit.base import RefitProblem
from facts.utils.batches import batch_size, in_parts, shared, to_device, within_memory


@dataclass(frozen=True)
class InputGrams:
    """Sums over tokens `[n, n]` in float64: `compressed` = Σ x̃ x̃ᵀ and `cross` = Σ x x̃ᵀ."""

    compressed: Tensor
    cross: Tensor


def input_grams(problem: RefitProblem, names: list[str]) -> dict[str, InputGrams]:
    """Collect the sums of some layers in one data pass through both networks."""
    calibration, device = problem.calibration, next(problem.network.parameters()).device
    original, compressed = {name: calibration.layers[name] for name in names}, problem.layers(names)

    def collect(num_parts: int) -> dict[str, InputGrams]:
        sizes = {name: (layer.in_features, layer.in_features) for name, layer in original.items()}
        zeros = {name: torch.zeros(2, *size, dtype=torch.float64, device=device) for name, size in sizes.items()}
        for batch in shared(calibration.data or (), "refit", zeros.values()):
            for inputs, _ in in_parts(batch, num_parts):
                inputs = to_device(inputs, device)
                with torch.no_grad(), autocast(device, calibration.execution.precision):
                    before = _inputs(calibration.model, original, inputs)
                    after = _inputs(problem.network, compressed, inputs)
                for name, sums in zeros.items():
                    sums[0].add_(after[name].T @ after[name])
                    sums[1].add_(before[name].T @ after[name])
        return {name: InputGrams(*sums) for name, sums in zeros.items()}

    return within_memory(collect, calibration.execution.memory.halve_batches)


def _inputs(model: nn.Module, layers: Mapping[str, nn.Linear], inputs: Any) -> dict[str, Tensor]:
    """Inputs `[N T, n]` of each layer, in float32 or better."""
    found: dict[str, Tensor] = {}

    def note(name: str, x: Tensor, _: Tensor | None) -> None:
        found[name] = at_least_float32(x).flatten(0, 1)

    with capturing(model, layers, note, with_grads=False) as capture:
        capture.start_batch(batch_size(inputs))
        run(model, inputs)
        if capture.inputs_have_changed():  # run again, with copies of them
            capture.start_batch(batch_size(inputs))
            run(model, inputs)
        capture.finish_batch()
    return found


def best_left(target: Tensor, gram: Tensor, right: Tensor) -> Tensor:
    """Find the U `[m, k]` that minimises Σ ‖y - U V x̃‖² for a V `[k, n]`; it ignores directions without energy."""
    return target @ right.T @ torch.linalg.pinv(right @ gram @ right.T, rtol=NEAR_SINGULAR, hermitian=True)


def best_right(target: Tensor, gram: Tensor, left: Tensor, weight: Tensor, ridge: float) -> Tensor:
    """Find the V `[k, n]` that minimises Σ ‖y - U V x̃‖² + ridge ‖U V - W‖² for a U `[m, k]`.

    It is the best full weight projected onto U. Without a ridge, directions of x̃ without energy keep W `[m, n]`.
    """
    ridged = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    change = (target - weight @ gram) @ torch.linalg.pinv(ridged, rtol=NEAR_SINGULAR, hermitian=True)
    return torch.linalg.pinv(left, rtol=NEAR_SINGULAR) @ (weight + change)
