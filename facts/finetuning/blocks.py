"""Outputs of the blocks of two networks, and the error with which one matches the other."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from facts.modules.heads import PaddedHeads
from facts.modules.lowrank import LowRankLayer
from facts.moments.batch import at_least_float32
from facts.moments.data_pass import blocks_of
from facts.moments.statistics import at_least_tiny


def compressed_blocks(model: nn.Module, original: nn.Module) -> list[str]:
    """Find the names of blocks with low-rank or narrower layers; of the low-rank layers, if they are in no block."""
    sizes = {name: parameter.shape for name, parameter in original.named_parameters()}
    low_rank = [module for module in model.modules() if isinstance(module, LowRankLayer)]
    narrower = [
        module
        for name, module in model.named_modules()
        if isinstance(module, PaddedHeads)
        or (isinstance(module, nn.Linear) and sizes.get(f"{name}.weight", module.weight.shape) != module.weight.shape)
    ]
    found = blocks_of(model, [*low_rank, *narrower]) or low_rank
    return [name for name, module in model.named_modules() if module in found]


@contextmanager
def outputs_of(model: nn.Module, names: Iterable[str]) -> Iterator[list[Tensor]]:
    """Collect the output of each call of these modules within the `with` block in a list, in order.

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
                    f"the original has no {name}, whose output should be matched: give the network that was "
                    "compressed, or block_weight=0"
                )
            stack.callback(modules[name].register_forward_hook(note).remove)
        yield outputs


def matching_error(originals: list[Tensor], changed: list[Tensor], num_samples: int) -> Tensor:
    """Σ over samples and outputs of ‖changed - original‖² / ‖original‖².

    Outputs whose shapes differ, as after pruning a width that all blocks share, are skipped.
    """
    errors = []
    for pair in zip(originals, changed, strict=True):
        if pair[0].shape != pair[1].shape:
            continue
        original, other = (at_least_float32(output).reshape(num_samples, -1) for output in pair)
        errors.append(((other - original).square().sum(1) / at_least_tiny(original.square().sum(1))).sum())
    return torch.stack(errors).sum() if errors else torch.zeros(())
