"""Data as batches of `(inputs, targets)`, which all other code reads, and samples that are held out of them."""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from facts.modules.networks import continues_text, is_encoder_decoder
from facts.moments.losses import next_tokens
from facts.utils.batches import Groups, NumberedBatches, batch_size, described, has_row_per_sample, unchanged
from facts.utils.cache import content_key
from facts.utils.distributed import loader_workers
from facts.utils.numerics import shuffled
from facts.utils.progress import waiting

Batch = tuple[Any, Any]
LABELS = ("labels", "label")
BATCH_SIZE = 64  # for samples that are not in batches
LEAST = 32  # samples, if a quarter of the data is that many
OPTIONS = "num_workers pin_memory timeout worker_init_fn multiprocessing_context prefetch_factor persistent_workers"
OF_TEXT = {"input_ids", "attention_mask", "position_ids", "token_type_ids"}


@dataclass(frozen=True, eq=False)
class Data:
    """Batches of a network's data: `(inputs, targets)`, where the targets are None if the data have no labels.

    They are the same in every pass and process: a list, or batches that are read by their number. If `rows` are given,
    only these samples of each batch belong to the data. A slice has the same batches and reads no others.
    """

    batches: list[Batch] | NumberedBatches
    rows: Sequence[Sequence[int]] | None = None

    @classmethod
    def of(cls, data: Any, model: nn.Module, purpose: str = "calibration") -> "Data":
        """Convert a dataset, a loader, batches, or tensors and arrays of inputs along the first axis.

        A loader is read in one order, with random transforms that depend on the number of the batch. What can only be
        iterated is kept in memory. Raises `ValueError` if there are no batches, and for what is no data.
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
        is_read = isinstance(self.batches, list) or self.rows is not None
        return next(waiting(self if is_read else (self.batches.first() for _ in range(1))), None)  # type: ignore[union-attr]

    @property
    def content_key(self) -> str | None:
        """A hash, if the data have one of their own."""
        own = None if isinstance(self.batches, list) else self.batches.content_key
        return own and content_key(own, [*self.batches.numbers], self.rows)  # type: ignore[union-attr]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, part: slice) -> "Data":
        return Data(self.batches[part], None if self.rows is None else self.rows[part])

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.batches):
            if self.rows is None or len(self.rows[number]) == (size := batch_size(batch[0])):
                yield batch
            elif rows := [row for row in self.rows[number] if row < size]:  # broken images are left out
                yield tree_map_only(Tensor, lambda tensor: tensor[rows], batch)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of samples in each batch; without reading them, at most that of the first one."""
        if self.rows is not None:
            return [len(rows) for rows in self.rows]
        if isinstance(self.batches, list):
            return [batch_size(inputs) for inputs, _ in self.batches]
        if isinstance(self.batches.items, Groups):
            return [len(self.batches.items.indices[number]) for number in self.batches.numbers]
        return [batch_size(self.first[0])] * len(self) if self.first else []

    def first_samples(self, number: int) -> "Data":
        """The first batches that hold this number of samples."""
        return self[: 1 + sum(total < number for total in accumulate(self.sizes))]

    def divided(self) -> tuple["Data", "Data"]:
        """The samples to work with and `num_held_out` others, spread evenly, whether they have labels or not.

        Batches that have no row for each sample are held out whole.
        """
        assert self.first is not None
        tensors, size = [part for part in self.first if part is not None], batch_size(self.first[0])
        is_divisible = self._groups or all(has_row_per_sample(part) and batch_size(part) == size for part in tensors)
        total = sum(self.sizes) if is_divisible else len(self)
        number = num_held_out(total) if is_divisible else num_held_out(total, -(-LEAST // size))
        held_out = [(place + 1) * number // total > place * number // total for place in range(total)]
        if not is_divisible:
            kept, out = ([n for n in range(total) if held_out[n] == is_out] for is_out in (False, True))
            return self._only(dict.fromkeys(kept)), self._only(dict.fromkeys(out))
        parts: tuple[dict[int, Any], dict[int, Any]] = {}, {}
        for number, (size, start) in enumerate(zip(self.sizes, accumulate(self.sizes, initial=0), strict=False)):
            for row in range(size):
                parts[held_out[start + row]].setdefault(number, []).append(row)
        return self._only(parts[0]), self._only(parts[1])

    @property
    def _groups(self) -> Groups | None:
        items = None if isinstance(self.batches, list) else self.batches.items
        return items if isinstance(items, Groups) else None

    def _only(self, rows: Mapping[int, Sequence[int] | None]) -> "Data":
        """The batches with these numbers, or only those rows of them."""
        chosen = [*rows.values()]
        if isinstance(self.batches, list):
            batches: Any = [self.batches[number] for number in rows]
        elif groups := self._groups:  # the other samples are not read
            given = [groups.indices[self.batches.numbers[number]] for number in rows]
            indices = [[each[row] for row in own or ()] for each, own in zip(given, chosen, strict=True)]
            items = replace(groups, indices=indices)
            return Data(replace(self.batches, items=items, numbers=range(len(indices)), slices={}))
        else:
            batches = replace(self.batches, numbers=[self.batches.numbers[number] for number in rows], slices={})
        if self.rows is not None:
            chosen = [[self.rows[number][row] for row in own or ()] for number, own in rows.items()]
        return Data(batches, None if None in chosen else chosen)  # type: ignore[arg-type]


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
    has_length = isinstance(data, Dataset) and isinstance(data, Sized) and not isinstance(data, IterableDataset)
    if has_length:
        data = _loader(data, model)
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        data = _numbered(data)
    if isinstance(data, NumberedBatches):
        return replace(data, finish=partial(_finished, data.finish, model), slices={})
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
    """The batches of a loader in one order: if it shuffles, in that of a seed of ours, or else as drawn here."""
    options = {name: getattr(loader, name) for name in OPTIONS.split()}
    if hasattr(loader, "set_epoch"):  # accelerate's loaders, such as the Trainer's, shuffle by the number of the pass
        loader.set_epoch(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if loader.batch_sampler is None:  # an item is a batch
            return NumberedBatches(loader.dataset, loader.collate_fn, None, [*loader.sampler], options)
        if type(loader.batch_sampler) is BatchSampler and isinstance(loader.sampler, RandomSampler):
            order = shuffled(len(loader.dataset), 0).split(loader.batch_size)  # type: ignore[arg-type]
            indices = [part.tolist() for part in order]
        else:
            indices = [[*group] for group in loader.batch_sampler]
    groups = Groups(loader.dataset, indices, loader.collate_fn)
    return NumberedBatches(groups, unchanged, None, range(len(groups)), options)


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
