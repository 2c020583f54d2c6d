"""Moments of every layer, from one data pass or from the cache, within the memory of the device."""

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from facts.modules.lowrank import LayersOfHeads, LinearLayer
from facts.modules.networks import replaced_forwards
from facts.moments.batch import LayerBatch, at_least_float32
from facts.moments.data_pass import DataPass, within_memory
from facts.moments.losses import Loss, summed_cross_entropy
from facts.moments.statistics import Counts, Moment
from facts.utils import distributed
from facts.utils.batches import Batches
from facts.utils.cache import Cache
from facts.utils.options import Count, options

log = logging.getLogger(__name__)

T = TypeVar("T")

SHARE_OF_MOMENTS = 0.5  # of the free memory; the rest is for the passes


@options
class MemoryPolicy:
    """Placement of moments, number of layers at a time, and memory of a pass.

    `moments` are on the `device`, in main memory (`host`), or with `auto` on the device up to half of its free memory.
    With `halve_batches`, a pass that runs out of memory starts again with each batch in two parts, then in four, and so
    on; sums that a method defines per batch then cover smaller batches. A data pass covers `layers_at_once` layers,
    which are decomposed before the next pass; None covers all.
    """

    moments: Literal["auto", "device", "host"] = "auto"
    halve_batches: bool = True
    layers_at_once: Count | None = None

    def groups(self, layers: Iterable[T]) -> list[list[T]]:
        """Divide the layers, in order, into groups whose moments are in memory at the same time."""
        layers = list(layers)
        size = self.layers_at_once or len(layers) or 1
        return [layers[start : start + size] for start in range(0, len(layers), size)]

    def room_for_moments(self, device: torch.device) -> float:
        """Bytes of the device that moments may take."""
        free = math.inf
        if device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(device)[0]
        return {"host": 0, "auto": SHARE_OF_MOMENTS * free, "device": math.inf}[self.moments]


DEFAULT_POLICY = MemoryPolicy()


@dataclass
class LayerMoments:
    """The moments of one layer, read as `moments[InputGram()]`."""

    totals: dict[Moment, Any]
    device: torch.device | None = None  # where moments are read; some are kept in main memory until then

    def __getitem__(self, moment: Moment) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.device), self.totals[moment])

    @property
    def num_samples(self) -> int:
        return int(self[Counts()][0][0])

    @property
    def num_tokens(self) -> int:
        return int(self[Counts()][0][1])


def collect_moments(
    model: nn.Module,
    layers: Mapping[str, LinearLayer],
    calibration: Batches,
    moments: Iterable[Moment],
    *,
    loss: Loss = summed_cross_entropy,
    precision: torch.dtype = torch.float32,
    memory: MemoryPolicy = DEFAULT_POLICY,
    cache: Cache | None = None,
    only: Collection[str] | None = None,
    append_one: Collection[str] = (),
) -> dict[str, LayerMoments]:
    """Collect the given moments of every layer, or of those in `only`, in one pass, or read them from the cache.

    `calibration` yields `(inputs, targets)`; `loss(outputs, targets)` is the sum of the samples' losses.
    `precision` is the autocast type of the model's passes; sums are float32 or better. Inputs of the layers in
    `append_one` become `[x, 1]`, which adds 1 to d_in. `cache` must belong to this model, layers, data, loss and
    precision; processes that share it take turns. Processes started by torchrun divide the batches; each gets all
    moments. Raises `ValueError` as `DataPass.run` does.
    """
    device = next(model.parameters()).device
    layers = {name: layer for name, layer in layers.items() if only is None or name in only}
    wanted = dict.fromkeys([Counts(), *moments])
    known = _cached(wanted, cache, layers)
    if known.keys() < wanted.keys():
        with cache.locked("data_pass") if cache else nullcontext():
            known |= _cached(wanted.keys() - known.keys(), cache, layers)  # another run may have collected them
            if missing := [moment for moment in wanted if moment not in known]:
                log.info("data pass for %d moments of %d layers", len(missing), len(layers))

                def collect(num_parts: int) -> dict[Moment, dict[str, Any]]:
                    room = min(distributed.all_gather(memory.room_for_moments(device)))
                    settings = room, num_parts, append_one
                    return MomentPass(model, layers, missing, loss, precision, *settings).run(calibration)

                known |= within_memory(collect, memory.halve_batches)
            if cache:
                for moment in (moment for moment in missing if moment.is_kept):
                    moment.save(cache, known[moment])
    return {name: LayerMoments({moment: known[moment][name] for moment in wanted}, device) for name in layers}


def _cached(moments: Iterable[Moment], cache: Cache | None, layers: Iterable[str]) -> dict[Moment, dict[str, Any]]:
    kept = {moment: moment.load(cache, layers) for moment in moments} if cache else {}
    return {moment: totals for moment, totals in kept.items() if totals is not None}


@dataclass
class MomentPass:
    """One pass over the data that accumulates `totals[moment][layer]`, on the device while they fit in `room` bytes.

    A total that does not fit is kept in main memory: each batch's part is computed on the device, then added to it. The
    layers within an attention's heads run in one call; moments that take all heads have one total for them.
    """

    model: nn.Module
    layers: Mapping[str, LinearLayer]
    moments: list[Moment]
    loss: Loss
    precision: torch.dtype
    room: float = math.inf
    num_parts: int = 1
    append_one: Collection[str] = ()

    def __post_init__(self) -> None:
        self.elsewhere: set[tuple[Moment, str]] = set()
        self.heads = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, LayersOfHeads) and set(module) <= set(self.layers.values())
        }
        owners = {layer: name for name, heads in self.heads.items() for layer in heads}
        self.called: dict[str, list[str]] = defaultdict(list)  # layers by the module that is called
        for name, layer in self.layers.items():
            self.called[owners.get(layer, name)].append(name)
        self.totals = {
            moment: {name: self._place(moment, name) for name in (self.called if moment.takes_heads else self.layers)}
            for moment in self.moments
        }

    def run(self, calibration: Batches) -> dict[Moment, dict[str, Any]]:
        """Run the pass over all processes; return the finished moments, by moment and layer."""
        needs_grads = any(moment.needs_grads for moment in self.moments)
        modules = {**self.layers, **self.heads}
        called = {name: modules[name] for name in self.called}
        settings = self.loss, self.precision, needs_grads, self.num_parts
        data_pass = DataPass(self.model, called, self._add, *settings)
        sums = (
            tensor
            for moment, totals in self.totals.items()
            for total in totals.values()
            for tensor in moment.reducible(total, data_pass.next_sample)
        )
        with replaced_forwards({heads: heads.at_once for heads in self.heads.values()}):
            data_pass.run(calibration, "calibration", sums)
        return {
            moment: {
                layer: moment.finalize(total)
                for name in list(totals)
                for layer, total in self._by_layer(name, totals.pop(name))
            }
            for moment, totals in self.totals.items()
        }

    def _by_layer(self, name: str, total: Any) -> Iterable[tuple[str, Any]]:
        return zip(self.called[name], zip(*total, strict=True), strict=True) if name in self.heads else [(name, total)]

    def _add(self, name: str, batch: LayerBatch) -> None:
        layers = self.called[name]
        if layers[0] in self.append_one:
            batch = batch.with_one()
        if name in self.heads:
            batch = batch.of_heads(len(layers), self.heads[name].num_heads)
        for moment, totals in self.totals.items():
            for each, own in [(name, batch)] if name in totals else zip(layers, batch.heads, strict=True):
                self._add_to(moment, each, own)

    def _add_to(self, moment: Moment, name: str, batch: LayerBatch) -> None:
        total = self.totals[moment][name]
        if (moment, name) in self.elsewhere:
            part = self._init_state(moment, name, batch.x.device)
            moment.add(part, batch)
            sums = (moment.reducible(each, batch.num_samples) for each in (total, part))
            for kept, addend in zip(*sums, strict=True):
                kept += addend.to(kept.device)
        else:
            moment.add(total, batch)

    def _place(self, moment: Moment, name: str) -> Any:
        """Make an empty total, on the layer's device or in main memory."""
        layers = self.called.get(name, [name])
        weight = next(self.layers[layers[0]].parameters())
        num_values = len(layers) * moment.num_held(*self._widths(layers[0]))
        size = num_values * at_least_float32(weight[:0]).element_size()
        if moment.can_offload and size > self.room:
            self.elsewhere.add((moment, name))
            return self._init_state(moment, name, torch.device("cpu"))
        self.room -= size
        return self._init_state(moment, name, weight.device)

    def _init_state(self, moment: Moment, name: str, device: torch.device) -> Any:
        if name in self.heads:
            states = (self._init_state(moment, layer, device) for layer in self.called[name])
            return tuple(map(torch.stack, zip(*states, strict=True)))
        weight = next(self.layers[name].parameters())
        like = at_least_float32(weight[:0].detach()).to(device)
        return moment.init_state(name, like, *self._widths(name))

    def _widths(self, name: str) -> tuple[int, int]:
        layer = self.layers[name]
        return layer.in_features + (name in self.append_one), layer.out_features
