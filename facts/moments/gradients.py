"""Gradients that are kept whole: one mean weight gradient for each group of samples, on disk or on the device."""

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from facts.moments.batch import LayerBatch
from facts.moments.statistics import Moment
from facts.utils import distributed
from facts.utils.cache import Cache
from facts.utils.files import needing_room, replacing

log = logging.getLogger(__name__)

CHUNK_BYTES = 2**28


class GradientStore:
    """A growing stack of `[m, n]` gradients that is read in chunks `[k, m, n]`, so it need not fit in memory."""

    def __init__(self, like: Tensor, shape: tuple[int, int], path: Path | None):
        self.like, self.shape, self.path = like, shape, path
        self.num_gradients = 0
        self.held: list[Tensor] = []
        self.digest = hashlib.sha256()  # of what was written

    @property
    def per_chunk(self) -> int:
        return max(1, CHUNK_BYTES // (self.shape[0] * self.shape[1] * self.like.element_size()))

    def append(self, gradient: Tensor) -> None:
        if self.path is None:
            self.held.append(gradient)
        else:
            values = gradient.cpu().numpy().data
            self.digest.update(values)
            try:
                with needing_room(self.path), self.path.open("ab") as file:
                    file.write(values)
            except OSError:
                drop_unfinished(self.path)
                raise
        self.num_gradients += 1

    def is_whole(self, checksum: str) -> bool:
        """Whether the file is there, with all gradients as they were written."""
        size = self.num_gradients * self.shape[0] * self.shape[1] * self.like.element_size()
        if self.path is None or not self.path.exists() or self.path.stat().st_size != size:
            return False
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == checksum

    def on_device(self) -> Tensor:
        """All gradients of the layer `[K, m, n]`, on its device."""
        return torch.cat([*self.chunks(), self.like.new_empty(0, *self.shape)])

    def chunks(self) -> Iterator[Tensor]:
        """Read the gradients on the device, `[k, m, n]` at a time."""
        if self.path is None:
            for start in range(0, self.num_gradients, self.per_chunk):
                yield torch.stack(self.held[start : start + self.per_chunk])
            return
        size = self.num_gradients * self.shape[0] * self.shape[1]
        stored = torch.from_file(str(self.path), size=size, dtype=self.like.dtype).view(-1, *self.shape)
        for chunk in stored.split(self.per_chunk):
            yield chunk.to(self.like.device)


def drop_unfinished(path: Path) -> None:
    """Delete the files of a pass that failed: one layer's file is useless without the others'."""
    moment = path.stem.rpartition("-")[0]
    for suffix in (".gradients", ".part"):
        for file in path.parent.glob(f"{moment}-*{suffix}"):
            file.unlink(missing_ok=True)  # other processes do the same


class GroupMeans:
    """The mean weight gradient of each group of samples in a store, one group after another.

    If several processes share a group, each has the mean over its own samples until they are joined.
    """

    def __init__(self, like: Tensor, shape: tuple[int, int], path: Path | None):
        self.path = path
        own_path = path and path.with_suffix(f".{distributed.rank()}.part") if distributed.size() > 1 else path
        for file in filter(None, (path, own_path)):
            file.unlink(missing_ok=True)  # of an interrupted pass
        self.store = GradientStore(like, shape, own_path)
        self.sizes: dict[int, int] = {}  # samples by group, in the order of the store
        self.group = 0
        self.sum = like.new_zeros(shape)

    def add_samples(self, group: int, grads: Tensor, inputs: Tensor) -> None:
        """Add the weight gradients of some samples of one group, `[k, T, m]` and `[k, T, n]`."""
        if group != self.group:
            self.close_group()
            self.group = group
        self.sum.addmm_(grads.flatten(0, 1).T, inputs.flatten(0, 1))
        self.sizes[group] = self.sizes.get(group, 0) + len(grads)

    def close_group(self) -> None:
        if self.group in self.sizes and self.store.num_gradients < len(self.sizes):
            self.store.append(self.sum / self.sizes[self.group])
            self.sum.zero_()

    def join(self) -> None:
        """Join the groups of all processes, each with the mean over all its samples; the main rank writes the file."""
        self.close_group()
        store = self.store
        whole = GradientStore(store.like, store.shape, self.path)
        sizes = sum(map(Counter, distributed.all_gather(self.sizes)), Counter())
        weights = [self.sizes[group] / sizes[group] if group in self.sizes else 0 for group in sorted(sizes)]
        own = (gradient for chunk in store.chunks() for gradient in chunk)
        for start in range(0, len(weights), store.per_chunk):
            chunk = weights[start : start + store.per_chunk]
            means = torch.stack([next(own) * weight if weight else torch.zeros_like(self.sum) for weight in chunk])
            distributed.all_reduce([means])
            for mean in means if self.path is None or distributed.is_main_rank() else ():
                whole.append(mean)
        whole.num_gradients = len(sizes)
        if store.path:
            store.path.unlink(missing_ok=True)  # missing if a process had no batch
        self.store = whole


@dataclass(frozen=True)
class GroupGradients(Moment):
    """The mean weight gradient of every `group_size` samples in order, as a `GradientStore`.

    Its size grows with the number of groups: `store: disk` streams it to files (the default, 4 bytes a value), `device`
    keeps it on the device of the layer.
    """

    group_size: int = 64
    store: Literal["disk", "device"] = "disk"

    is_kept = False  # it takes hundreds of times the network's size
    can_offload = False

    def shapes(self, d_in, d_out):
        return ((d_out, d_in),)

    @property
    def on_disk(self) -> bool:
        return self.store == "disk"

    def num_values(self, d_in, d_out, num_samples):
        return math.ceil(num_samples / self.group_size) * d_in * d_out

    def num_held(self, d_in, d_out):
        return d_in * d_out

    def init_state(self, layer: str, like: Tensor, d_in: int, d_out: int, file: Path) -> GroupMeans:
        path = file.with_suffix(".gradients") if self.store == "disk" else None
        return GroupMeans(like.new_empty(0), (d_out, d_in), path)

    def add(self, total: GroupMeans, batch: LayerBatch) -> None:
        start = 0
        while start < batch.num_samples:
            group, within = divmod(batch.first_sample + start, self.group_size)
            end = min(batch.num_samples, start + self.group_size - within)
            total.add_samples(group, batch.g[start:end], batch.x[start:end])
            start = end

    def all_reduce(self, totals: Mapping[str, GroupMeans]) -> None:
        for total in totals.values() if distributed.size() > 1 else ():
            total.join()

    def finalize(self, total: GroupMeans) -> GradientStore:
        total.close_group()
        return total.store

    def save(self, cache: Cache, totals: dict[str, GradientStore]) -> None:
        """Record which files are complete; the gradients are written already (`disk`), or not kept (`device`)."""
        if self.store == "device":
            return
        index = {
            name: {
                "file": store.path.name,
                "shape": store.shape,
                "num_gradients": store.num_gradients,
                "dtype": str(store.like.dtype).removeprefix("torch."),
                "sha256": store.digest.hexdigest(),
            }
            for name, store in totals.items()
            if store.path
        }
        with replacing(cache.folder / f"{self.key}.json") as path:
            path.write_text(json.dumps(index, indent=1))

    def load(self, cache: Cache, layers: Iterable[str], device: torch.device) -> dict[str, GradientStore] | None:
        path = cache.folder / f"{self.key}.json"
        if self.store == "device" or not path.exists():
            return None
        try:
            entries = json.loads(path.read_text())
            known = {name: self._store(cache, entries[name], device) for name in layers}
            damaged = [store.path for name, store in known.items() if not store.is_whole(entries[name]["sha256"])]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.warning("the list of gradients %s is damaged (%r): they are collected again", path, error)
            path.unlink(missing_ok=True)
            return None
        if damaged:
            log.warning("the gradients in %s are damaged: they are collected again", damaged[0])
            path.unlink(missing_ok=True)
            return None
        return known

    def delete(self, cache: Cache) -> None:
        (cache.folder / f"{self.key}.json").unlink(missing_ok=True)
        for file in cache.folder.glob(f"{self.key}-*.gradients"):
            file.unlink()

    @staticmethod
    def _store(cache: Cache, entry: dict, device: torch.device) -> GradientStore:
        like = torch.empty(0, dtype=getattr(torch, entry["dtype"]), device=device)
        store = GradientStore(like, tuple(entry["shape"]), cache.folder / entry["file"])
        store.num_gradients = entry["num_gradients"]
        return store
