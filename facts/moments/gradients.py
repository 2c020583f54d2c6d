"""Gradients that are kept whole: one mean weight gradient for each group of samples, on disk or on the device."""

import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from facts.cache import Cache
from facts.files import needing_room, replacing
from facts.moments.batch import LayerBatch
from facts.moments.statistics import Moment

log = logging.getLogger(__name__)

CHUNK_BYTES = 2**28


class GradientStore:
    """A growing stack of `[m, n]` gradients that is read in chunks `[k, m, n]`, so that it need not fit in memory."""

    def __init__(self, like: Tensor, shape: tuple[int, int], path: Path | None):
        self.like, self.shape, self.path = like, shape, path
        self.num_gradients = 0
        self.pending = like.new_zeros(shape)
        self.num_pending = 0
        self.held: list[Tensor] = []

    def add_samples(self, grads: Tensor, inputs: Tensor) -> None:
        """Add the weight gradients of some samples, `[k, T, m]` and `[k, T, n]`, to the group under way."""
        self.pending.addmm_(grads.flatten(0, 1).T, inputs.flatten(0, 1))
        self.num_pending += len(grads)

    def close_group(self) -> None:
        if not self.num_pending:
            return
        mean = self.pending / self.num_pending
        if self.path is None:
            self.held.append(mean)
        else:
            try:
                with needing_room(self.path), self.path.open("ab") as file:
                    file.write(mean.cpu().numpy())
            except OSError:
                drop_unfinished(self.path)
                raise
        self.num_gradients += 1
        self.pending.zero_()
        self.num_pending = 0

    def is_whole(self) -> bool:
        size = self.num_gradients * self.shape[0] * self.shape[1] * self.like.element_size()
        return self.path.exists() and self.path.stat().st_size == size

    def chunks(self) -> Iterator[Tensor]:
        """The gradients `[k, m, n]`, some at a time, on the device."""
        per_chunk = max(1, CHUNK_BYTES // (self.shape[0] * self.shape[1] * self.like.element_size()))
        if self.path is None:
            for start in range(0, self.num_gradients, per_chunk):
                yield torch.stack(self.held[start : start + per_chunk])
            return
        size = self.num_gradients * self.shape[0] * self.shape[1]
        stored = torch.from_file(str(self.path), size=size, dtype=self.like.dtype).view(-1, *self.shape)
        for chunk in stored.split(per_chunk):
            yield chunk.to(self.like.device)


def drop_unfinished(path: Path) -> None:
    """Give back the room of a pass that failed: no layer's file is of use without those of the others."""
    moment = path.stem.rpartition("-")[0]
    for file in path.parent.glob(f"{moment}-*{path.suffix}"):
        file.unlink()


@dataclass(frozen=True)
class GroupGradients(Moment):
    """The mean weight gradient of every `group_size` samples in order, as a `GradientStore`.

    Its size grows with the number of groups: `store: disk` streams it to files (the default, 4 bytes a value), `device`
    keeps it where the layer computes.
    """

    group_size: int = 64
    store: Literal["disk", "device"] = "disk"

    def shapes(self, d_in, d_out):
        return ((d_out, d_in),)

    @property
    def on_disk(self):
        return self.store == "disk"

    def num_values(self, d_in, d_out, num_samples):
        return math.ceil(num_samples / self.group_size) * d_in * d_out

    def start(self, layer: str, like: Tensor, d_in: int, d_out: int, file: Path) -> GradientStore:
        path = file.with_suffix(".gradients") if self.store == "disk" else None
        if path:
            path.unlink(missing_ok=True)  # of a pass that was cut short
        return GradientStore(like.new_empty(0), (d_out, d_in), path)

    def add(self, total: GradientStore, batch: LayerBatch) -> None:
        start = 0
        while start < batch.num_samples:
            end = min(batch.num_samples, start + self.group_size - total.num_pending)
            total.add_samples(batch.g[start:end], batch.x[start:end])
            if total.num_pending == self.group_size:
                total.close_group()
            start = end

    def finish(self, total: GradientStore) -> GradientStore:
        total.close_group()
        return total

    def save(self, cache: Cache, totals: dict[str, GradientStore]) -> None:
        """Write down which files are whole; the gradients themselves are there already (`disk`), or are not kept."""
        if self.store == "device":
            return
        index = {
            name: {
                "file": store.path.name,
                "shape": store.shape,
                "num_gradients": store.num_gradients,
                "dtype": str(store.like.dtype).removeprefix("torch."),
            }
            for name, store in totals.items()
        }
        with replacing(cache.folder / f"{self.key}.json") as path:
            path.write_text(json.dumps(index, indent=1))

    def load(self, cache: Cache, layers: Iterable[str], device: torch.device) -> dict[str, GradientStore] | None:
        path = cache.folder / f"{self.key}.json"
        if self.store == "device" or not path.exists():
            return None
        try:
            stores = {name: self._store(cache, entry, device) for name, entry in json.loads(path.read_text()).items()}
            known = {name: stores[name] for name in layers}
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError):
            log.warning("the list of gradients %s is damaged: they are collected again", path)
            path.unlink()
            return None
        for store in known.values():
            if not store.is_whole():
                log.warning("the gradients in %s are cut short: they are collected again", store.path)
                path.unlink()
                return None
        return known

    @staticmethod
    def _store(cache: Cache, entry: dict, device: torch.device) -> GradientStore:
        like = torch.empty(0, dtype=getattr(torch, entry["dtype"]), device=device)
        store = GradientStore(like, tuple(entry["shape"]), cache.folder / entry["file"])
        store.num_gradients = entry["num_gradients"]
        return store
