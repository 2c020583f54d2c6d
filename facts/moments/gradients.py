"""Gradients kept in full: one mean weight gradient per group of samples, on disk or on the device."""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from facts.moments.batch import LayerBatch
from facts.moments.statistics import Moment, file_name
from facts.utils import distributed
from facts.utils.cache import Cache
from facts.utils.files import needing_room

log = logging.getLogger(__name__)

CHUNK_BYTES = 2**28
SUFFIX = ".gradients"


class GradientStore:
    """A growing stack of `[m, n]` gradients that is read in chunks `[k, m, n]`, so it need not fit in memory.

    `like [0, m, n]` has their type and device; without a `path` they are kept on that device.
    """

    def __init__(self, like: Tensor, path: Path | None):
        self.like, self.path = like, path
        self.num_gradients = 0
        self.held: list[Tensor] = []
        self.hash = hashlib.sha256()  # of everything written

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape[1:])

    @property
    def num_bytes(self) -> int:
        """Bytes of one gradient."""
        return math.prod(self.shape) * self.like.element_size()

    @property
    def per_chunk(self) -> int:
        return max(1, CHUNK_BYTES // self.num_bytes)

    @property
    def digest(self) -> Tensor:
        """SHA-256 of the gradients written `[32]`."""
        return torch.tensor(list(self.hash.digest()), dtype=torch.uint8)

    def append(self, gradient: Tensor) -> None:
        if self.path is None:
            self.held.append(gradient)
        else:
            values = gradient.cpu().numpy().data
            self.hash.update(values)
            try:
                with needing_room(self.path), self.path.open("ab") as file:
                    file.write(values)
            except OSError:
                _drop_unfinished(self.path)
                raise
        self.num_gradients += 1

    def find(self, digest: Tensor) -> bool:
        """Check whether the file exists and holds all gradients exactly as written; if so, they can be read."""
        if self.path is None or not self.path.exists():
            return False
        with self.path.open("rb") as file:
            self.hash = hashlib.file_digest(file, "sha256")
        self.num_gradients = self.path.stat().st_size // self.num_bytes
        return self.digest.equal(digest)

    def on_device(self) -> Tensor:
        """All gradients of the layer `[K, m, n]`, on its device."""
        return torch.cat([*self.chunks(), self.like])

    def chunks(self) -> Iterator[Tensor]:
        """Yield the gradients on the device, `[k, m, n]` at a time."""
        if self.path is None:
            for start in range(0, self.num_gradients, self.per_chunk):
                yield torch.stack(self.held[start : start + self.per_chunk])
            return
        shape = (self.num_gradients, *self.shape)
        stored = torch.from_file(str(self.path), size=math.prod(shape), dtype=self.like.dtype).view(shape)
        for chunk in stored.split(self.per_chunk):
            yield chunk.to(self.like.device)


def _drop_unfinished(path: Path) -> None:
    """Delete the files of a pass that failed: one layer's file is useless without the others'."""
    moment = path.stem.rpartition("-")[0]
    for suffix in (SUFFIX, ".part"):
        for file in path.parent.glob(f"{moment}-*{suffix}"):
            file.unlink(missing_ok=True)  # other processes do the same


class GroupMeans:
    """The mean weight gradient of each group of samples in a store, one group after another.

    If several processes share a group, each has the mean over its own samples until they are joined.
    """

    def __init__(self, like: Tensor, path: Path | None):
        self.path = path
        own_path = path and path.with_suffix(f".{distributed.rank()}.part") if distributed.size() > 1 else path
        for file in filter(None, (path, own_path)):
            file.unlink(missing_ok=True)  # left by an interrupted pass
        self.store = GradientStore(like, own_path)
        self.sizes: dict[int, int] = {}  # samples by group, in the order of the store
        self.group = 0
        self.sum = like.new_zeros(like.shape[1:])

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

    def joined(self) -> GradientStore:
        """Join the groups of all processes, each with the mean over all its samples; the main rank writes the file."""
        self.close_group()
        if distributed.size() == 1:
            return self.store
        store = self.store
        whole = GradientStore(store.like, distributed.all_gather(self.path)[0])
        sizes = sum(map(Counter, distributed.all_gather(self.sizes)), Counter())
        weights = [self.sizes[group] / sizes[group] if group in self.sizes else 0 for group in sorted(sizes)]
        own = (gradient for chunk in store.chunks() for gradient in chunk)
        for start in range(0, len(weights), store.per_chunk):
            chunk = weights[start : start + store.per_chunk]
            means = torch.stack([next(own) * weight if weight else torch.zeros_like(self.sum) for weight in chunk])
            distributed.all_reduce([means])
            for mean in means if whole.path is None or distributed.is_main_rank() else ():
                whole.append(mean)
        whole.num_gradients = len(sizes)
        if store.path:
            store.path.unlink(missing_ok=True)  # missing if a process had no batch
        return whole


@dataclass(frozen=True)
class GroupGradients(Moment):
    """The mean weight gradient of each `group_size` consecutive samples, as a `GradientStore`.

    Its size grows with the number of groups: `store: disk` (the default) streams it to files, 4 bytes per value;
    `device` keeps it on the layer's device.
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
        return GroupMeans(like.new_empty(0, d_out, d_in), file.with_suffix(SUFFIX) if self.on_disk else None)

    def add(self, total: GroupMeans, batch: LayerBatch) -> None:
        start = 0
        while start < batch.num_samples:
            group, within = divmod(batch.first_sample + start, self.group_size)
            end = min(batch.num_samples, start + self.group_size - within)
            total.add_samples(group, batch.g[start:end], batch.x[start:end])
            start = end

    def reducible(self, total: GroupMeans) -> tuple[Tensor, ...]:
        return ()  # `finalize` joins the processes' groups

    def finalize(self, total: GroupMeans) -> GradientStore:
        return total.joined()

    def save(self, cache: Cache, totals: dict[str, GradientStore]) -> None:
        """Record which files are complete; the gradients are written already (`disk`), or not kept (`device`)."""
        if self.on_disk:
            records = {f"{name}/like": store.like for name, store in totals.items()}
            cache.save(self.key, records | {f"{name}/digest": store.digest for name, store in totals.items()})

    def load(self, cache: Cache, layers: Iterable[str], device: torch.device) -> dict[str, GradientStore] | None:
        records = cache.load(self.key) if self.on_disk else None
        if records is None:
            return None
        known = {
            name: GradientStore(
                records[f"{name}/like"].to(device), (cache.folder / file_name(self, name)).with_suffix(SUFFIX)
            )
            for name in layers
        }
        damaged = [store.path for name, store in known.items() if not store.find(records[f"{name}/digest"])]
        if any(distributed.all_gather(damaged)):
            log.warning(
                "the gradients in %s are damaged: they are collected again", damaged[0] if damaged else cache.folder
            )
            cache.delete(self.key)
            return None
        return known

    def delete(self, cache: Cache) -> None:
        cache.delete(self.key)
        for file in cache.folder.glob(f"{self.key}-*{SUFFIX}"):
            file.unlink(missing_ok=True)  # other processes do the same
