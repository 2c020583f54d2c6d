"""Outputs of the blocks of two networks, one of which is to match the other's."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from facts.modules.lowrank import LowRankLayer
from facts.moments.batch import at_least_float32
from facts.moments.checkpointing import blocks_of
from facts.moments.statistics import at_least_tiny


def changed_blocks(model: nn.Module, original: nn.Module) -> list[str]:
    """Names of the blocks with low-rank layers or narrower units; of low-rank layers, if they lie in no block."""
    low_rank = [module for module in model.modules() if isinstance(module, LowRankLayer)]
    found = blocks_of(model, low_rank + _narrower(model, original)) or low_rank
    return [name for name, module in model.named_modules() if module in found]


def _narrower(model: nn.Module, original: nn.Module) -> list[nn.Module]:
    """Linear layers of another shape than the original's, or of no counterpart: within padded heads."""
    shapes = {name: module.weight.shape for name, module in original.named_modules() if isinstance(module, nn.Linear)}
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [module for name, module in linear if module.weight.shape != shapes.get(name)]


@contextmanager
def outputs_of(model: nn.Module, names: Iterable[str]) -> Iterator[list[Tensor]]:
    """A list that takes up the output of each call of these modules within the `with` block, in order.

    Raises `ValueError` for a name that the network does not have.
    """
    outputs: list[Tensor] = []
    modules = dict(model.named_modules())

    def note(module: nn.Module, args: tuple, output: object) -> None:
        outputs.append(next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))

    with ExitStack() as stack:
        for name in names:
            if name not in modules:
                raise ValueError(
                    f"the original has no {name}, whose output is to be matched: give the network that was compressed, "
                    "or block_weight=0"
                )
            stack.callback(modules[name].register_forward_hook(note).remove)
        yield outputs


def matching_error(originals: list[Tensor], changed: list[Tensor], num_samples: int) -> Tensor:
    """Σ over samples and outputs of the squared distance over the squared norm of the original."""
    errors = []
    for pair in zip(originals, changed, strict=True):
        original, other = (at_least_float32(output).reshape(num_samples, -1) for output in pair)
        errors.append(((other - original).square().sum(1) / at_least_tiny(original.square().sum(1))).sum())
    return torch.stack(errors).sum()
