"""Inputs and gradients of one layer by token position, over many samples: kept on disk, read a few tokens at a time."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from facts.moments.batch import LayerBatch
from facts.moments.data_pass import DataPass
from facts.moments.losses import Loss
from facts.utils.files import ScratchFolder, needing_room
from facts.utils.progress import with_progress


class TokenStore:
    """A layer's inputs and output gradients by token. Batches are appended to one file a kind, token first.

    Only one batch is in memory. Inputs and gradients are read divided by their root mean square, so that products of
    four of them stay within the range of float32; results computed from them must not depend on their scale.
    """

    def __init__(self):
        self.scratch = ScratchFolder()
        self.batch_sizes: list[int] = []
        self.num_tokens = 0
        self.like = torch.empty(0)
        self.features: dict[str, int] = {}
        self.energies = {"inputs": 0.0, "grads": 0.0}

    @property
    def num_samples(self) -> int:
        return sum(self.batch_sizes)

    def add(self, batch: LayerBatch) -> None:
        """Append a batch. Raises `ValueError` if it has another number of tokens than the batches before."""
        num_samples, num_tokens = batch.x.shape[:2]
        if self.batch_sizes and num_tokens != self.num_tokens:
            raise ValueError(
                f"token positions can only be compared if all batches have the same number: {self.num_tokens} before, "
                f"{num_tokens} now"
            )
        self.num_tokens, self.like = num_tokens, batch.x.new_empty(0)
        self.batch_sizes.append(num_samples)
        for kind, tensor in (("inputs", batch.x), ("grads", batch.g)):
            self.features[kind] = tensor.shape[-1]
            self.energies[kind] += tensor.double().square().sum().item()
            with needing_room(self._path(kind)), self._path(kind).open("ab") as file:
                file.write(tensor.transpose(0, 1).contiguous().cpu().numpy().data)

    def read(self, kind: str, start: int, end: int) -> Tensor:
        """Read the `inputs` or `grads` of some tokens `[end - start, N, d]`; over all tokens their mean square is 1."""
        features, dtype = self.features[kind], np.dtype(str(self.like.dtype).removeprefix("torch."))
        parts, before = [], 0
        for num_samples in self.batch_sizes:
            size = num_samples * features
            offset = (before + start * size) * dtype.itemsize
            values = np.fromfile(self._path(kind), dtype, (end - start) * size, offset=offset)
            parts.append(torch.from_numpy(values).view(end - start, num_samples, features))
            before += self.num_tokens * size
        mean_square = self.energies[kind] / (self.num_tokens * self.num_samples * features)
        return torch.cat(parts, dim=1).div_(mean_square**0.5 or 1.0).to(self.like.device)

    def _path(self, kind: str) -> Path:
        return self.scratch.path / kind


def collect_tokens(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Iterable[tuple[Any, Any]],
    *,
    loss: Loss,
    precision: torch.dtype = torch.float32,
) -> dict[str, TokenStore]:
    """Fill a store for each layer in one forward and backward pass."""
    stores = {name: TokenStore() for name in layers}
    data_pass = DataPass(model, layers, lambda name, batch: stores[name].add(batch), loss, precision, needs_grads=True)
    data_pass.run(with_progress(batches, "tokens"))
    return stores
