"""Data as batches of `(inputs, targets)`, which all other code reads, and samples that are held out of them."""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, islice
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from facts.modules.networks import continues_text, is_encoder_decoder
from facts.moments.losses import next_tokens
from facts.utils.batches import Groups, NumberedBatches, batch_size, described, has_row_per_sample, unchanged
from facts.utils.cache import content_key
from facts.utils.distributed import loader_workers
from facts.utils.numerics import seeded
from facts.utils.progress import waiting

Batch = tuple[Any, Any]
LABELS = ("labels", "label")
BATCH_SIZE = 64  # for samples that are not in batches
LEAST = 32  # samples, if a quarter of the data is that many
OPTIONS = "num_workers pin_memory timeout worker_init_fn multiprocessing_context prefetch_factor"
OF_TEXT = {"input_ids", "attention_mask", "position_ids", "token_type_ids"}


@dataclass(frozen=True)
class Share:
    """The samples of numbered batches that are held out, or the others: `number` of `total`, evenly spread.

    They are counted as if each batch had `size` samples.
    """

    number: int
    total: int
    size: int
    held_out: bool

    def __call__(self, number: int, batch: Batch) -> Batch | None:
        rows = self.rows(number * self.size, batch_size(batch[0]))
        return _with_rows(batch, rows) if rows else None

    def rows(self, start: int, size: int) -> list[int]:
        """Which of the samples from number `start` on belong to the share."""
        return [row for row in range(size) if self.includes(start + row)]

    def includes(self, place: int) -> bool:
        return self.held_out == ((place + 1) * self.number // self.total > place * self.number // self.total)


@dataclass(frozen=True, eq=False)
class Data:
    """Batches of a network's data: `(inputs, targets)`, where the targets are None if the data have no labels.

    They are the same in every pass and process: a list, or batches that are read by their number. Of a list, only the
    `rows` of each batch belong to the data, if they are given. A slice has the same batches and reads no others.
    """

    batches: list[Batch] | NumberedBatches
    rows: Sequence[Sequence[int]] | None = None

    @classmethod
    def of(cls, data: Any, model: nn.Module, purpose: str = "calibration") -> "Data":
        """Convert a dataset, a loader, batches, or tensors and arrays of inputs along the first axis.

        A loader is read in one order, with random transforms that depend on the number of the batch. One with code of
        its own, and what can only be iterated, is copied into memory. Raises `ValueError` if there are no batches, and
        for what is no data.
        """
        data = data if isinstance(data, Data) else cls(_batches(data, model))
        if data.first is None:
            raise ValueError(f"the {purpose} data is empty: it must yield at least one (inputs, targets) batch")
        return data

    @property
    def in_memory(self) -> bool:
        """Whether all batches are in a list, and can be looked at without being read."""
        return isinstance(self.batches, list)

    @cached_property
    def first(self) -> Batch | None:
        """The first batch; None if there is none."""
        return next(waiting(self if isinstance(self.batches, list) else self.batches.one_by_one()), None)

    @property
    def content_key(self) -> str | None:
        """A hash, if the data have one of their own."""
        if isinstance(self.batches, list) or self.batches.content_key is None:
            return None
        return content_key(self.batches.content_key, [*self.batches.numbers])

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, part: slice) -> "Data":
        return self._at(range(len(self))[part])

    def __iter__(self) -> Iterator[Batch]:
        if self.rows is None:
            yield from self.batches
            return
        for rows, batch in zip(self.rows, self.batches, strict=True):
            yield _with_rows(batch, rows)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of samples in each batch; if that is unknown without reading them, as many as in the first one."""
        if self.rows is not None:
            return [len(rows) for rows in self.rows]
        if isinstance(self.batches, list):
            return [batch_size(inputs) for inputs, _ in self.batches]
        if groups := self._groups:
            return [len(groups.indices[number]) for number in self.batches.numbers]
        return [batch_size(self.first[0])] * len(self) if self.first else []

    def few_samples(self, number: int) -> "Data":
        """As many batches as hold this number of samples, from everywhere: the samples may be in order of classes."""
        count = min(len(self), 1 + sum(total < number for total in accumulate(self.sizes)))
        return self._at([place * len(self) // count for place in range(count)])

    def divided(self) -> tuple["Data", "Data"]:
        """The samples to work with and `num_held_out` others, spread evenly, whether they have labels or not.

        Batches that have no row for each sample are held out whole. A sample that a loader draws twice is one.
        """
        assert self.first is not None
        tensors, size = [part for part in self.first if part is not None], batch_size(self.first[0])
        has_rows = all(has_row_per_sample(part) and batch_size(part) == size for part in tensors)
        if groups := self._groups:
            given = (groups.indices[number] for number in self.batches.numbers)  # type: ignore[union-attr]
            place = {index: number for number, index in enumerate(dict.fromkeys(chain.from_iterable(given)))}
            kept, out = (self._of_indices(groups, place, share) for share in _shares(len(place), LEAST))
        elif has_rows:
            kept, out = map(self._of_rows, _shares(sum(self.sizes), LEAST, size))
        else:
            kept, out = map(self._whole, _shares(len(self), -(-LEAST // size)))
        return kept, out

    @property
    def _groups(self) -> Groups | None:
        """The items of a dataset behind the batches, if they are samples."""
        if isinstance(self.batches, list) or not isinstance(items := self.batches.items, Groups) or not self.first:
            return None
        first = items.indices[self.batches.numbers[0]]
        return items if not has_row_per_sample(self.first[0]) or batch_size(self.first[0]) == len(first) else None

    def _of_indices(self, groups: Groups, place: Mapping[int, int], share: Share) -> "Data":
        """The items of a share, of each group; the others are not read."""
        assert isinstance(self.batches, NumberedBatches)
        given = (groups.indices[number] for number in self.batches.numbers)
        indices = [own for each in given if (own := [index for index in each if share.includes(place[index])])]
        key = self.content_key and content_key(self.content_key, indices)
        items, numbers = replace(groups, indices=indices), range(len(indices))
        return Data(replace(self.batches, items=items, numbers=numbers, content_key=key, parts={}))

    def _of_rows(self, share: Share) -> "Data":
        """The samples of a share, of each batch."""
        if isinstance(self.batches, NumberedBatches):
            key = self.content_key and content_key(self.content_key, repr(share))
            choose = partial(_both, self.batches.choose, share)
            return Data(replace(self.batches, choose=choose, content_key=key, parts={}))
        starts = accumulate(self.sizes, initial=0)
        found = [share.rows(start, size) for start, size in zip(starts, self.sizes, strict=False)]
        given = self.rows or [range(size) for size in self.sizes]
        rows = [[each[row] for row in own] for each, own in zip(given, found, strict=True) if own]
        return Data([batch for batch, own in zip(self.batches, found, strict=True) if own], rows)

    def _whole(self, share: Share) -> "Data":
        """The batches of a share."""
        return self._at([place for place in range(len(self)) if share.includes(place)])

    def _at(self, places: Sequence[int]) -> "Data":
        if isinstance(self.batches, NumberedBatches):
            return Data(self.batches.at(places))
        return Data([self.batches[place] for place in places], self.rows and [self.rows[place] for place in places])


def _shares(total: int, least: int, size: int = 1) -> list[Share]:
    return [Share(num_held_out(total, least), total, size, is_out) for is_out in (False, True)]


def _with_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    is_whole = len(rows) == batch_size(batch[0])
    return batch if is_whole else tree_map_only(Tensor, lambda tensor: tensor[rows], batch)


def _both(choose: Callable[[int, Batch], Batch | None], share: Share, number: int, batch: Batch) -> Batch | None:
    chosen = choose(number, batch)
    return None if chosen is None else share(number, chosen)


NO_DATA = Data([])


def num_held_out(num_samples: int, least: int = LEAST) -> int:
    """A tenth of the samples; at least `least`, but no more than a quarter."""
    return min(num_samples // 4, max(least, num_samples // 10))


def _batches(data: Any, model: nn.Module) -> list[Batch] | NumberedBatches:
    if isinstance(data, Mapping | str | Path) or not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        raise ValueError(f"the data must be a loader or a list of batches, got a {type(data).__name__}")
    if isinstance(data, np.ndarray):
        data = _as_tensor(data)
    if isinstance(data, Tensor):
        data = data.split(BATCH_SIZE)
    if isinstance(data, Dataset) and isinstance(data, Sized) and not isinstance(data, IterableDataset):
        data = _loader(data, model)
    is_indexed = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
    if is_indexed and (type(data).__iter__ is DataLoader.__iter__ or hasattr(data, "set_epoch")):
        data = _numbered(data)
    if isinstance(data, NumberedBatches):
        return replace(data, finish=partial(_finished, data.finish, model), parts={})
    if not isinstance(data, list | tuple):
        data = (tree_map_only(Tensor, torch.clone, batch) for batch in data)  # they may share memory
    return [_with_samples(as_pair(batch, model)) for batch in data]


def _finished(finish: Callable[[Any], Any], model: nn.Module, item: Any) -> Batch | None:
    batch = finish(item)
    return None if batch is None else _with_samples(as_pair(batch, model))


def _loader(data: Dataset, model: nn.Module) -> DataLoader:
    """Loader of batches; for a GPU, worker processes fill pinned memory, unless the samples are on it already."""
    feeds = len(data) and next(model.parameters(), torch.empty(0)).is_cuda  # type: ignore[arg-type]
    feeds = bool(feeds) and not any(leaf.is_cuda for leaf in tree_leaves(data[0]) if isinstance(leaf, Tensor))
    return DataLoader(data, BATCH_SIZE, num_workers=loader_workers(None) if feeds else 0, pin_memory=feeds)


def _numbered(loader: DataLoader) -> NumberedBatches:
    """The batches of a loader, in the order of one seed; accelerate's, such as the Trainer's, have epochs."""
    options = {name: getattr(loader, name) for name in OPTIONS.split()}
    if loader.num_workers and loader.worker_init_fn:
        options["worker_init_fn"] = partial(_in_worker, loader.worker_init_fn)
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(0)
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    with seeded(0):
        if loader.batch_sampler is None:  # an item is a batch
            indices, collate = [[index] for index in _seeded(loader.sampler)], partial(_of_one, collate)
        else:
            drawn = islice(_seeded(loader.batch_sampler), length_hint(loader) or None)  # some repeat themselves
            indices = [[*group] for group in drawn]
    return NumberedBatches(Groups(loader.dataset, indices, collate), unchanged, None, range(len(indices)), options)


def _seeded(sampler: Any) -> Any:
    """A copy of a sampler, and of that within it, without a generator in a state of its own."""
    sampler = copy(sampler)
    if hasattr(getattr(sampler, "generator", None), "manual_seed"):
        sampler.generator = torch.Generator().manual_seed(0)
    if isinstance(getattr(sampler, "sampler", None), Sampler):
        sampler.sampler = _seeded(sampler.sampler)
    return sampler


def _of_one(collate: Callable[[Any], Any], items: list[Any]) -> Any:
    return collate(items[0])


def _in_worker(prepare: Callable[[int], None], worker: int) -> None:
    """Call a loader's `worker_init_fn` while its own dataset is that of the worker."""
    info: Any = get_worker_info()
    groups = info.dataset
    object.__setattr__(info, "dataset", groups.items)  # it is read-only
    prepare(worker)
    object.__setattr__(info, "dataset", groups)


def as_pair(batch: Any, model: nn.Module) -> Batch:
    """Convert one batch, and its arrays to tensors. Raises `ValueError` for other forms, samples and padded texts.

    A batch may be `(inputs, targets)`; a mapping of inputs by name, with or without `labels`; or only inputs. For
    language models that continue a text, the targets are the next tokens.
    """
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
