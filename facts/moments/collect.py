"""The data pass over calibration batches."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from facts.cache import Cache, content_key
from facts.capture import Capture, capturing
from facts.files import ScratchFolder
from facts.layers import batch_size
from facts.moments.batch import LayerBatch
from facts.moments.statistics import Counts, Moment

Loss = Callable[[Any, Any], Tensor]


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Σ over samples of each one's own cross-entropy; targets are class indices `[N]` or probabilities `[N, C]`."""
    return F.cross_entropy(logits, targets, reduction="sum")


@dataclass
class LayerMoments:
    """The moments of one layer, read as `moments[InputGram()]`."""

    totals: dict[Moment, Any]
    scratch: ScratchFolder | None = None  # kept as long as the moments, some of which lie in it

    def __getitem__(self, moment: Moment) -> Any:
        return self.totals[moment]

    @property
    def num_samples(self) -> int:
        return int(self[Counts()][0][0])

    @property
    def num_tokens(self) -> int:
        return int(self[Counts()][0][1])


def collect_moments(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    calibration: Iterable[tuple[Any, Any]],
    moments: Iterable[Moment],
    *,
    loss: Loss = summed_cross_entropy,
    precision: torch.dtype = torch.float32,
    cache: Cache | None = None,
) -> dict[str, LayerMoments]:
    """Collect the given moments of every layer in one pass, or read those that the cache has.

    `calibration` yields `(inputs, targets)`; `loss(outputs, targets)` is the sum over samples of each one's own loss.
    `precision` is the autocast type of the model's passes (float32 or bfloat16); sums are float32 or better. Memory is
    that of the moments and of one batch. Raises `ValueError` for NaN or infinity in a layer and for a layer that never
    ran. `cache` must be of this model, these layers, data, loss and precision.
    """
    device = next(model.parameters()).device
    wanted = dict.fromkeys([Counts(), *moments])
    known = {moment: moment.load(cache, layers, device) for moment in wanted} if cache else {}
    missing = [moment for moment in wanted if known.get(moment) is None]
    scratch = None if cache else ScratchFolder()
    if missing:
        data_pass = DataPass(model, layers, missing, loss, precision, cache.folder if cache else scratch.path)
        known.update(data_pass.run(calibration))
        for moment in missing if cache else ():
            moment.save(cache, known[moment])
    return {name: LayerMoments({moment: known[moment][name] for moment in wanted}, scratch) for name in layers}


class DataPass:
    """One pass over the data; `totals[moment][layer]` grow with it."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Linear],
        moments: list[Moment],
        loss: Loss,
        precision: torch.dtype,
        folder: Path,
    ):
        self.model, self.layers, self.loss, self.precision, self.folder = model, layers, loss, precision, folder
        self.device = next(model.parameters()).device
        self.needs_grads = any(moment.needs_grads for moment in moments)
        self.totals: dict[Moment, dict[str, Any]] = {moment: {} for moment in moments}
        self.finite: dict[str, tuple[Tensor, ...]] = {}

    def run(self, calibration: Iterable[tuple[Any, Any]]) -> dict[Moment, dict[str, Any]]:
        """The finished moments, by moment and layer."""
        self.accumulate(track(calibration, "calibration", transient=True, console=Console(stderr=True)))
        return {
            moment: {name: moment.finish(total) for name, total in layers.items()}
            for moment, layers in self.totals.items()
        }

    def accumulate(self, batches: Iterable[tuple[Any, Any]]) -> None:
        """Add batches to the totals."""
        number = -1
        with capturing(self.model, self.layers, self._add, self.needs_grads) as capture:
            for number, (inputs, targets) in enumerate(batches):
                capture.start_batch(batch_size(inputs))
                with torch.set_grad_enabled(self.needs_grads):
                    self._pass(capture, to_device(inputs, self.device), to_device(targets, self.device))
                self._check_finite(number)
        if number < 0:
            raise ValueError("the calibration data is empty: it must yield at least one (inputs, targets) batch")
        if silent := [name for name in self.layers if name not in capture.ever_ran]:
            raise ValueError(f"layers that never ran on the calibration data: {', '.join(silent)}; leave them out")

    def _pass(self, capture: Capture, inputs: Any, targets: Any) -> None:
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            outputs = self.model(inputs)
            if capture.inputs_have_changed():  # nothing is added yet: run the batch once more, with copies
                capture.start_batch(capture.num_samples)
                outputs = self.model(inputs)
            loss = self.loss(outputs, targets) if self.needs_grads else None
        if loss is not None:
            loss.backward()
        capture.finish_batch()

    def _add(self, name: str, x: Tensor, g: Tensor | None) -> None:
        batch = LayerBatch(x, g)
        # Left on the device and read once a batch: a check here would make the device wait at every layer.
        self.finite[name] = tuple(t.sum().isfinite() for t in (batch.x, batch.g) if t is not None)
        for moment, totals in self.totals.items():
            if name not in totals:
                file = self.folder / f"{moment.key}-{content_key(name)}"
                totals[name] = moment.start(batch.x, x.shape[-1], self.layers[name].out_features, file)
            moment.add(totals[name], batch)

    def _check_finite(self, batch_number: int) -> None:
        # The first layer of the forward pass, then of the backward one, is the nearest to the cause.
        activations = [(name, "activations", 0) for name in self.layers]
        grads = [(name, "output gradients", 1) for name in reversed(self.layers)]
        for name, what, index in activations + (grads if self.needs_grads else []):
            if name in self.finite and not self.finite[name][index]:
                raise ValueError(
                    f"NaN or infinity in the {what} of layer {name}, in calibration batch {batch_number} (from 0); "
                    "check the data and the weights, or use precision float32"
                )
        self.finite.clear()


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors, and those within mappings, lists and tuples, on `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)
