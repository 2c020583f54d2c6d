"""The inputs of the same layers in two networks: in the original, and in one whose earlier layers are compressed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from facts.modules.modes import autocast
from facts.modules.networks import run
from facts.moments.batch import at_least_float32
from facts.moments.capture import capturing
from facts.moments.memory import within_memory
from facts.refit.base import Compressing
from facts.utils.batches import batch_size, in_parts, shared, to_device


@dataclass(frozen=True)
class Flows:
    """Sums over tokens in float64: `own [n, n]` = Σ x̃ x̃ᵀ and `joint [n, n]` = Σ x x̃ᵀ.

    x̃ are the inputs of a layer in the compressed network, x those in the original.
    """

    own: Tensor
    joint: Tensor


def flows_of(work: Compressing, names: list[str]) -> dict[str, Flows]:
    """Collect the sums of some layers in one pass of both networks."""
    calibration = work.calibration
    original = calibration.model, {name: calibration.layers[name] for name in names}
    compressed = work.network, work.layers(names)
    device, precision = next(calibration.model.parameters()).device, calibration.execution.precision

    def collect(num_parts: int) -> dict[str, Flows]:
        sums = {name: Flows(*_zeros(layer)) for name, layer in original[1].items()}
        totals = [tensor for flows in sums.values() for tensor in (flows.own, flows.joint)]
        for batch in shared(calibration.data or (), "refit", totals):
            for inputs, _ in in_parts(batch, num_parts):
                inputs = to_device(inputs, device)
                with torch.no_grad(), autocast(device, precision):
                    first, own = _inputs(*original, inputs), _inputs(*compressed, inputs)
                for name, flows in sums.items():
                    flows.own.add_(own[name].T @ own[name])
                    flows.joint.add_(first[name].T @ own[name])
        return sums

    return within_memory(collect, calibration.execution.memory)


def _zeros(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    shape = (layer.in_features, layer.in_features)
    return tuple(torch.zeros(shape, dtype=torch.float64, device=layer.weight.device) for _ in range(2))  # type: ignore


def _inputs(model: nn.Module, layers: Mapping[str, nn.Linear], inputs: Any) -> dict[str, Tensor]:
    """Inputs `[N T, n]` of each layer, in float32 or better."""
    found: dict[str, Tensor] = {}

    def note(name: str, x: Tensor, _: Tensor | None) -> None:
        found[name] = at_least_float32(x).flatten(0, 1)

    with capturing(model, layers, note, with_grads=False) as capture:
        capture.start_batch(batch_size(inputs))
        run(model, inputs)
        if capture.inputs_have_changed():  # once more, with copies of them
            capture.start_batch(batch_size(inputs))
            run(model, inputs)
        capture.finish_batch()
    return found
