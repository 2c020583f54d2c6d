"""One layer's batch, and the intermediate products that several moments share.

Legend: N samples, T tokens, n = d_in, m = d_out; D_k = G_kᵀ X_k [m, n] is the weight gradient of sample k. All heads of
an attention make one batch; then every shape has an axis more, H, at its front.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

LEAST_NORM = 1e-10  # token gradients with a smaller norm do not count


class LayerBatch:
    """`x [N, T, n]` and `g [N, T, m]`, if needed, in float32 or better; the place of the first sample in the data.

    The tokens are those of `num_calls` calls of the layer, one after another.
    """

    def __init__(self, x: Tensor, g: Tensor | None, first_sample: int = 0, num_calls: int = 1):
        self.x = at_least_float32(x)
        self._g = None if g is None else at_least_float32(g)
        self.first_sample, self.num_calls = first_sample, num_calls
        self.weights: dict[Any, Tensor] = {}  # of samples, by clipping: moments share them

    @property
    def g(self) -> Tensor:
        assert self._g is not None, "a moment that reads gradients must set needs_grads"
        return self._g

    @property
    def num_samples(self) -> int:
        return self.x.shape[-3]

    @property
    def calls(self) -> list["LayerBatch"]:
        """The batch of each call; the whole one if they differ in length."""
        if self.num_calls == 1 or self.x.shape[1] % self.num_calls:
            return [self]
        inputs, grads = (each.chunk(self.num_calls, dim=1) for each in (self.x, self.g))
        return [LayerBatch(x, g, self.first_sample) for x, g in zip(inputs, grads, strict=True)]

    def with_one(self) -> "LayerBatch":
        """The same batch with a one appended to each input, `[N, T, n + 1]`: a bias becomes a column of the weight."""
        x = aligned_empty(self.x, self.x.shape[-1] + 1)
        x[..., :-1], x[..., -1] = self.x, 1
        return LayerBatch(x, self._g, self.first_sample)

    def of_heads(self, num_layers: int, num_heads: int) -> "LayerBatch":
        """The batch of all heads' layers, in which calls of `num_heads` heads were adjacent along T."""

        def by_layer(tensor: Tensor) -> Tensor:
            heads = tensor.unflatten(1, (-1, num_layers, num_heads // num_layers))
            return heads.movedim(2, 0).flatten(2, 3).contiguous()

        return LayerBatch(by_layer(self.x), None if self._g is None else by_layer(self._g), self.first_sample)

    @cached_property
    def heads(self) -> list["LayerBatch"]:
        grads = [None] * len(self.x) if self._g is None else self._g
        return [LayerBatch(x, g, self.first_sample) for x, g in zip(self.x, grads, strict=True)]

    @cached_property
    def with_clipped_tokens(self) -> "LayerBatch":
        """The same batch with each token's gradient scaled to 0.1 to 10 times the mean norm in its sample.

        The published code of FLAR-SVD's authors does the same. Zero gradients stay zero and do not count in the mean.
        """
        norms = self.g_energy.sqrt()
        counted = (norms > LEAST_NORM).sum(dim=-1, keepdim=True).clamp(min=1)
        mean = norms.where(norms > LEAST_NORM, 0).sum(dim=-1, keepdim=True) / counted
        factors = torch.where(norms > LEAST_NORM, norms.clamp(0.1 * mean, 10 * mean) / norms, 1)
        return LayerBatch(self.x, self.g * factors[..., None], self.first_sample)

    @cached_property
    def x_energy(self) -> Tensor:
        """‖x_t‖² `[N, T]`."""
        return torch.linalg.vector_norm(self.x, dim=-1).square()

    @cached_property
    def g_energy(self) -> Tensor:
        """‖g_t‖² `[N, T]`."""
        return torch.linalg.vector_norm(self.g, dim=-1).square()

    @cached_property
    def tokens_are_cheaper(self) -> bool:
        """Whether `[T, T]` Gram matrices take fewer operations than the D_k `[m, n]` of each sample."""
        tokens, n = self.x.shape[-2:]
        m = self.g.shape[-1]
        through_tokens = 2 * tokens**2 * (m + n) + tokens * (m**2 + n**2) / 2
        through_gradients = tokens * m * n + m * n * (m + n) / 2
        return through_tokens < through_gradients

    @cached_property
    def mixed_inputs(self) -> Tensor:
        """G_k G_kᵀ X_k `[N, T, n]`, so that D_kᵀ D_k = X_kᵀ times it."""
        return (self.g @ self.g.mT) @ self.x

    @cached_property
    def mixed_grads(self) -> Tensor:
        """X_k X_kᵀ G_k `[N, T, m]`, so that D_k D_kᵀ = G_kᵀ times it."""
        return (self.x @ self.x.mT) @ self.g

    @cached_property
    def sample_grads(self) -> Tensor:
        """D_k `[N, m, n]`."""
        return self.g.mT @ self.x

    @cached_property
    def sample_grad_energy(self) -> Tensor:
        """Σ_i D_k[i, j]² `[N, n]`."""
        if self.tokens_are_cheaper:
            return (self.x * self.mixed_inputs).sum(dim=-2)
        return self.sample_grads.square().sum(dim=-2)


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


ALIGNMENT = 8  # values: a GPU's fast products take rows that start at multiples of 16 or 32 bytes
SYMMETRIC_BLOCKS = 8
MIN_BLOCKED_SIZE = 512
MIN_BLOCKED_SIZE_ON_GPU = 2048  # larger products come in four parts, for a few launches; not measured yet


def aligned_empty(like: Tensor, width: int) -> Tensor:
    """A tensor as `like`, but with rows of another width, aligned on a GPU; its values are arbitrary."""
    whole = width if like.device.type == "cpu" else -(-width // ALIGNMENT) * ALIGNMENT
    return like.new_empty(*like.shape[:-1], whole)[..., :width]


def _block_size(size: int, device: torch.device) -> int:
    """Rows of a symmetric product to compute together; on a GPU, odd ones at the end are left to another block."""
    if size < MIN_BLOCKED_SIZE:
        return size
    if device.type == "cpu":
        return -(-size // SYMMETRIC_BLOCKS)
    return size // (1 if size < MIN_BLOCKED_SIZE_ON_GPU else 4) // ALIGNMENT * ALIGNMENT


def add_symmetric(total: Tensor, left: Tensor, right: Tensor, weights: Tensor | None = None) -> None:
    """`total [d, d] += leftᵀ diag(weights) right`, a symmetric product, for `[N, T, d]` tensors and `[N, T]` weights.

    Of large ones, only the lower blocks are computed, on a CPU 56 % of the products; `mirror` fills in the rest once.
    """
    if weights is not None:
        left = torch.mul(left, weights[..., None], out=aligned_empty(left, left.shape[-1]))
    if total.ndim > 2:  # by sample: no library divides a product's long axis among so many small ones
        total += (left.mT @ right).sum(dim=1)
        return
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    size, on_cpu = len(total), total.device.type == "cpu"
    step = _block_size(size, total.device)
    for start in range(0, size, step):
        block = slice(start, min(start + step, size))
        rows, columns, added_to = left[:, block].T, right[:, : block.stop], total[block, : block.stop]
        if on_cpu:
            added_to.addmm_(rows, columns)
        else:  # rows of the total may not be aligned, and those of a new product are
            added_to += rows @ columns


def mirror(total: Tensor) -> Tensor:
    """Fill in the upper triangle of a symmetric matrix from the lower one; in place, as it may fill half the memory."""
    for start in range(0, len(total), MIN_BLOCKED_SIZE):
        end = start + MIN_BLOCKED_SIZE
        block = total[start:end, start:end]
        block.copy_(block.tril() + block.tril(-1).T)
        total[start:end, end:] = total[end:, start:end].T
    return total


def split_samples(tensor: Tensor, num_samples: int, layer: str) -> Tensor:
    """Reshape `[B, ..., d]` to `[N, T, d]`: all axes between samples and features count as tokens.

    The first axis may hold several rows per sample, such as Swin's windows (`[N·windows, 49, d]`) or the flattened
    tokens of a Mamba mixer (`[N·T, d]`); a sample's rows are contiguous. Raises `ValueError` if it cannot be split.
    """
    if tensor.ndim < 2 or tensor.shape[0] % num_samples:
        raise ValueError(
            f"layer {layer} sees a tensor of shape {list(tensor.shape)} for a batch of {num_samples} samples: its "
            "first axis must hold the samples, or a whole number of rows a sample"
        )
    num_tokens = tensor.shape[:-1].numel() // num_samples  # none, if no token of a sample reaches an expert
    return tensor.reshape(num_samples, num_tokens, tensor.shape[-1])
