"""Moments of every layer, from one data pass or from the cache."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from facts.cache import Cache, content_key
from facts.files import ScratchFolder, locked
from facts.losses import Loss, summed_cross_entropy
from facts.moments.batch import LayerBatch
from facts.moments.data_pass import DataPass, shown
from facts.moments.statistics import Counts, Moment

log = logging.getLogger(__name__)


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
    ran. `cache` must be of this model, these layers, data, loss and precision; processes that share it take turns, so
    that no moment is collected twice.
    """
    device = next(model.parameters()).device
    wanted = dict.fromkeys([Counts(), *moments])
    scratch = None if cache else ScratchFolder()
    known = cached_moments(wanted, cache, layers, device)
    if known.keys() < wanted.keys():
        with locked(cache.folder / "data_pass.lock") if cache else nullcontext():
            known |= cached_moments(wanted.keys() - known.keys(), cache, layers, device)  # by who had the lock before
            missing = [moment for moment in wanted if moment not in known]
            if missing:
                folder = cache.folder if cache else scratch.path
                log.info("data pass for %d moments of %d layers", len(missing), len(layers))
                known |= MomentPass(model, layers, missing, loss, precision, folder).run(calibration)
            for moment in missing if cache else ():
                moment.save(cache, known[moment])
    return {name: LayerMoments({moment: known[moment][name] for moment in wanted}, scratch) for name in layers}


def cached_moments(
    moments: Iterable[Moment], cache: Cache | None, layers: Mapping[str, nn.Linear], device: torch.device
) -> dict[Moment, dict[str, Any]]:
    """Those of the moments that the cache has."""
    kept = {moment: moment.load(cache, layers, device) for moment in moments} if cache else {}
    return {moment: totals for moment, totals in kept.items() if totals is not None}


class MomentPass:
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
        self.layers, self.folder = layers, folder
        self.totals: dict[Moment, dict[str, Any]] = {moment: {} for moment in moments}
        needs_grads = any(moment.needs_grads for moment in moments)
        self.data_pass = DataPass(model, layers, self._add, loss, precision, needs_grads)

    def run(self, calibration: Iterable[tuple[Any, Any]]) -> dict[Moment, dict[str, Any]]:
        """The finished moments, by moment and layer."""
        self.accumulate(shown(calibration, "calibration"))
        return {
            moment: {name: moment.finish(total) for name, total in layers.items()}
            for moment, layers in self.totals.items()
        }

    def accumulate(self, batches: Iterable[tuple[Any, Any]]) -> None:
        """Add batches to the totals."""
        self.data_pass.run(batches)

    def _add(self, name: str, batch: LayerBatch) -> None:
        for moment, totals in self.totals.items():
            if name not in totals:
                file = self.folder / f"{moment.key}-{content_key(name)}"
                totals[name] = moment.start(name, batch.x, batch.x.shape[-1], self.layers[name].out_features, file)
            moment.add(totals[name], batch)
