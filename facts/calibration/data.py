"""Data as batches of `(inputs, targets)`, which all other code reads, and samples that are held out of them."""

import logging
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain, count, islice
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, default_collate

from facts.modules.networks import continues_text, is_encoder_decoder
from facts.moments.losses import next_tokens
from facts.utils.batches import batch_size, described, first_of, has_row_per_sample, share
from facts.utils.cache import content_key
from facts.utils.distributed import loader_workers

log = logging.getLogger(__name__)

Batch = tuple[Any, Any]
LABELS = ("labels", "label")
BATCH_SIZE = 64  # for samples that are not in batches
NUM_HASHED = 8
LEAST = 32  # samples, if a quarter of the data is that many
OPTIONS = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
OF_TEXT = {"input_ids", "attention_mask", "position_ids", "token_type_ids"}


@dataclass(frozen=True)
class Batches:
    """Batches of a network's data: `(inputs, targets)`, where the targets are None if the data have no labels.

    A batch may be such a pair; a mapping of inputs by name, with or without `labels`; or only inputs. For language
    models that continue a text, the targets are the next tokens. A `DataLoader` that shuffles with PyTorch's
    default generator yields the same batches every time.
    """

    data: Iterable[Any]
    model: nn.Module

    @property
    def content_key(self) -> str | None:
        return getattr(self.data, "content_key", None)

    def __iter__(self) -> Iterator[Batch]:
        return (_with_samples(_as_pair(batch, self.model)) for batch in _in_one_order(self.data))

    def __length_hint__(self) -> int:
        return length_hint(self.data)

    def shard(self, rank: int, size: int) -> "Batches":
        """Share of process `rank`; data with their own `shard` need not read the other shares."""
        own = getattr(self.data, "shard", None)
        return Batches(own(rank, size) if own else islice(_in_one_order(self.data), rank, None, size), self.model)


def _with_samples(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the batch itself. Raises `ValueError` if it has no samples, or no tensors of them."""
    first = next((leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)), None)
    if first is None:
        raise ValueError(
            f"the inputs of a batch hold no tensor, but {described(batch[0])}: give (inputs, targets), inputs alone or "
            "a mapping of inputs by name, as tensors [N, ...]; texts need a tokenizer, and files a transform"
        )
    if first.is_nested or first.layout != torch.strided:
        raise ValueError(f"a batch of the data is nested or {first.layout}: give dense tensors [N, ...]")
    if first.shape[:1] == (0,):
        raise ValueError(f"a batch of the data holds no samples ({described(first)}): leave it out")
    return batch


def _in_one_order(data: Iterable[Any]) -> Iterator[Any]:
    """Batches of the data; a loader that shuffles yields the same batches in every pass and every process."""
    if not isinstance(data, DataLoader):
        return iter(data)
    if hasattr(data, "set_epoch"):  # accelerate's loaders, such as the Trainer's, shuffle by the number of the pass
        data.set_epoch(0)
    kept, data._iterator = data._iterator, None  # persistent workers draw an order differently in their first pass
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            batches = iter(data)
            first = list(islice(batches, 1))  # the iterator draws the order
    finally:
        data._iterator = kept
    return chain(first, batches)


def as_batches(data: Iterable[Any] | None, model: nn.Module) -> Iterable[Batch] | None:
    """Convert the data to batches of `(inputs, targets)` that can be read repeatedly.

    Tensors and arrays, of inputs along the first axis, and datasets of samples are divided into batches.
    """
    if data is None or isinstance(data, Batches):
        return data
    if isinstance(data, Mapping | str | Path) or not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        raise ValueError(f"the data must be a loader or a list of batches, got a {type(data).__name__}")
    if isinstance(data, np.ndarray):
        data = _as_tensor(data)
    if isinstance(data, Tensor):
        data = list(data.split(BATCH_SIZE))
    elif isinstance(data, Dataset) and isinstance(data, Sized) and not isinstance(data, IterableDataset):
        data = _loader(data, model)
    if isinstance(data, tuple) or _can_be_read_once(data):
        data = list(data)
    return Batches(data, model)


def _loader(data: Dataset, model: nn.Module) -> DataLoader:
    """Loader of batches; for a GPU, worker processes fill pinned memory, unless the samples are on it already."""
    feeds = len(data) and next(model.parameters(), torch.empty(0)).is_cuda  # type: ignore[arg-type]
    feeds = bool(feeds) and not any(leaf.is_cuda for leaf in tree_leaves(data[0]) if isinstance(leaf, Tensor))
    return DataLoader(data, BATCH_SIZE, num_workers=loader_workers(None) if feeds else 0, pin_memory=feeds)


def _of_rows(loader: Any, rows: Callable[[int, int], list[int]]) -> DataLoader | None:
    """Loader of `rows(number, size)` of each batch, which reads no other samples; None if it might make others."""
    kinds = [type(each) for each in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))]
    if kinds != [DataLoader, SequentialSampler, BatchSampler] or loader.collate_fn is not default_collate:
        return None
    batches = enumerate(loader.batch_sampler)
    chosen = [[indices[row] for row in rows(number, len(indices))] for number, indices in batches]
    options = {name: getattr(loader, name) for name in OPTIONS}
    return DataLoader(loader.dataset, batch_sampler=[each for each in chosen if each], **options)


def _can_be_read_once(data: Iterable[Any]) -> bool:
    """Check whether a pass would continue where the last one ended, as the data or a loader's dataset iterate once."""
    if isinstance(data, DataLoader):
        return isinstance(data.dataset, IterableDataset) and _can_be_read_once(data.dataset)
    return iter(data) is iter(data)


def _as_pair(batch: Any, model: nn.Module) -> Batch:
    """Convert one batch, and its arrays to tensors. Raises `ValueError` for other forms, samples and padded texts."""
    batch = tree_map_only(UserDict, dict, batch)  # what processors and tokenizers of transformers return
    batch = tree_map_only(np.ndarray, _as_tensor, batch)
    if isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, targets = batch
        are_alike = isinstance(inputs, Tensor) and isinstance(targets, Tensor) and inputs.shape == targets.shape
        if continues_text(model) and are_alike and (inputs.equal(targets) or targets.max() <= 1 < inputs.max()):
            raise ValueError("the targets of a language model are the tokens that follow: facts.next_tokens(tokens)")
        return inputs, targets
    if isinstance(batch, list | tuple) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name not in LABELS}
        labels = next((batch[name] for name in LABELS if name in batch), None)
        if isinstance(labels, int) or (isinstance(labels, Tensor) and not labels.ndim):
            raise ValueError("the data are single samples: give batches of them, DataLoader(dataset, batch_size=64)")
        if not continues_text(model):
            if labels is not None and "decoder_input_ids" not in inputs and is_encoder_decoder(model):
                inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
            return inputs, labels
        if "attention_mask" in inputs and not inputs["attention_mask"].all():
            raise ValueError(
                "the texts are padded, and moments would count the padding too: cut them into windows of one length"
            )
        targets = next_tokens(inputs["input_ids"] if labels is None else labels)
        return (inputs["input_ids"] if inputs.keys() <= OF_TEXT else inputs), targets
    if isinstance(batch, Tensor):
        return batch, next_tokens(batch) if continues_text(model) else None
    raise ValueError(
        f"a batch of the data must be (inputs, targets), a mapping of inputs by name with `labels`, or inputs "
        f"alone, got a {type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, list | tuple) else ''}"
    )


def _as_tensor(array: np.ndarray) -> Tensor | np.ndarray:
    """Convert numbers to a tensor that shares their memory, unless it is read-only; return texts as given."""
    return torch.from_numpy(np.require(array, requirements="W")) if array.dtype.kind in "biufc" else array


def num_held_out(num_samples: int, least: int = LEAST) -> int:
    """A tenth of the samples; at least `least`, but no more than a quarter."""
    return min(num_samples // 4, max(least, num_samples // 10))


@dataclass(frozen=True)
class Split:
    """The samples of some batches that are held out, or the others; both are spread evenly over the data.

    A `share` of the samples, in batches of `size`, is held out by sample number; if `size` is None, a share of whole
    batches. The batches have the numbers `first`, `first + step`, ...; `key` is the hash of the inputs of number 0.
    `seen` holds those of the first `NUM_HASHED` parts of each pass, which show whether data change.
    """

    batches: Iterable[Batch]
    held_out: bool
    share: Fraction
    size: int | None
    key: str
    first: int = 0
    step: int = 1
    seen: dict[tuple[bool, int, int], str] = field(default_factory=dict)

    @property
    def content_key(self) -> str | None:
        own = getattr(self.batches, "content_key", None)
        return own and content_key(own, self.held_out, str(self.share), self.size)

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in zip(count(self.first, self.step), self._parts(), strict=False):
            if number < NUM_HASHED:
                key = content_key(batch[0])
                self._warn_of_changes(self.seen.setdefault((self.held_out, self.step, number), key), key)
            yield batch

    def _parts(self) -> Iterator[Batch]:
        if isinstance(self.batches, Batches) and self.size and (own := _of_rows(self.batches.data, self._rows)):
            if self.held_out and (first := first_of(self.batches)):
                self._warn_of_changes(self.key, content_key(first[0]))
            yield from Batches(own, self.batches.model)
            return
        for number, batch in zip(count(self.first, self.step), self.batches, strict=False):
            if number == 0 and self.held_out:
                self._warn_of_changes(self.key, content_key(batch[0]))
            if self.size is None:
                if self._includes(number):
                    yield batch
            elif rows := self._rows(number, batch_size(batch[0])):
                is_whole = len(rows) == batch_size(batch[0])
                yield batch if is_whole else tree_map_only(Tensor, lambda tensor: tensor[rows], batch)

    def _warn_of_changes(self, earlier: str, now: str) -> None:
        if earlier != now:
            log.warning("the data differ from pass to pass, so held-out ones may be seen: fix order and augmentation")

    def __length_hint__(self) -> int:
        return length_hint(self.batches)

    def shard(self, rank: int, size: int) -> "Split":
        return replace(self, batches=share(self.batches, rank, size), first=rank, step=size)

    def _rows(self, number: int, size: int) -> list[int]:
        assert self.size
        return [row for row in range(size) if self._includes(number * self.size + row)]

    def _includes(self, number: int) -> bool:
        is_held_out = (number + 1) * self.share // 1 > number * self.share // 1
        return is_held_out == self.held_out


def read(data: Iterable[Any], model: nn.Module, purpose: str = "calibration") -> tuple[Iterable[Batch], Batch]:
    """Convert data of a network to batches; return them and the first one. Raises `ValueError` if there are none."""
    batches = as_batches(data, model)
    first = first_of(batches or ())
    if batches is None or first is None:
        raise ValueError(f"the {purpose} data is empty: it must yield at least one (inputs, targets) batch")
    return batches, first


def in_memory(batches: Iterable[Batch]) -> bool:
    """Whether all batches are in a list, and can be looked at without being read."""
    return isinstance(getattr(batches, "data", batches), list)


def divide(batches: Iterable[Batch], first: Batch) -> tuple[Iterable[Batch], Iterable[Batch]]:
    """Divide data into samples to work with and `num_held_out` others; batches, if the `first` cannot be divided."""
    size, num_batches = batch_size(first[0]), length_hint(batches)
    num_samples = max(1, num_batches - 1) * size  # at least, since the last batch may be smaller
    if in_memory(batches) or not num_batches:
        sizes = [batch_size(inputs) for inputs, _ in batches]
        num_samples, num_batches = sum(sizes), len(sizes)
    tensors = [part for part in first if part is not None]
    if all(has_row_per_sample(part) and batch_size(part) == size for part in tensors):
        held_out = Split(batches, True, Fraction(num_held_out(num_samples), num_samples), size, content_key(first[0]))
    else:
        share = Fraction(num_held_out(num_batches, -(-LEAST // size)), num_batches)
        held_out = Split(batches, True, share, None, content_key(first[0]))
    return replace(held_out, held_out=False), held_out
