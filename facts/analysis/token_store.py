"""Inputs and gradients of one layer by token position, over many samples: kept on disk, read a few tokens at a time."""

from collections.abc import Iterable, Mapping
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
    """A layer's inputs and output gradients by token: one file per batch and kind, token axis first.

    Reading divides them by their root mean square, so that products of four stay within the range of float32.
    """

    def __init__(self):
        self.scratch = ScratchFolder()
        self.like = torch.empty(0)
        self.parts: dict[str, list[np.ndarray]] = {"inputs": [], "grads": []}
        self.energies = {"inputs": 0.0, "grads": 0.0}

    @property
    def num_tokens(self) -> int:
        return len(self.parts["inputs"][0])

    @property
    def num_samples(self) -> int:
        return sum(part.shape[1] for part in self.parts["inputs"])

    @property
    def widest(self) -> int:
        """The number of features of inputs or of gradients, whichever is larger."""
        return max(parts[0].shape[2] for parts in self.parts.values())

    def add(self, batch: LayerBatch) -> None:
        """Append a batch. Raises `ValueError` if its number of tokens differs from that of earlier batches."""
        if self.parts["inputs"] and batch.x.shape[1] != self.num_tokens:
            raise ValueError(
                f"token positions can only be compared if all batches have the same number: {self.num_tokens} before, "
                f"{batch.x.shape[1]} now"
            )
        self.like = batch.x.new_empty(0)
        for kind, tensor in (("inputs", batch.x), ("grads", batch.g)):
            self.energies[kind] += tensor.double().square().sum().item()
            values = tensor.transpose(0, 1).contiguous().cpu().numpy()
            path = self.scratch.path / f"{kind}-{len(self.parts[kind])}"
            with needing_room(path):
                path.write_bytes(values.data)
            self.parts[kind].append(np.memmap(path, values.dtype, "r", shape=values.shape))

    def read(self, kind: str, start: int, end: int) -> Tensor:
        """Read the `inputs` or `grads` of some tokens `[end - start, N, d]`; over all tokens their mean square is 1."""
        values = torch.from_numpy(np.concatenate([part[start:end] for part in self.parts[kind]], axis=1))
        mean_square = self.energies[kind] / (self.num_tokens * self.num_samples * values.shape[2])
        return values.div_(mean_square**0.5 or 1.0).to(self.like.device)


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
