"""Gradient checkpointing: the backward pass recomputes a block's activations instead of keeping them."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


def blocks_of(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Find the blocks that contain the layers, leaving out blocks nested in other blocks.

    A layer's block is the nearest module around it that is an entry of an `nn.ModuleList` or `nn.Sequential`.
    """
    layers = set(layers)
    places = [name for name, module in model.named_modules(remove_duplicate=False) if module in layers]
    blocks = dict.fromkeys(block for place in places if (block := _block_around(model, place)))
    within = {module for block in blocks for module in block.modules() if module is not block}
    return [block for block in blocks if block not in within]


def _block_around(model: nn.Module, name: str) -> nn.Module | None:
    path = name.split(".")
    for depth in range(len(path) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(path[: depth - 1])), nn.ModuleList | nn.Sequential):
            return model.get_submodule(".".join(path[:depth]))
    return None


class BlockRun:
    """One call of a block in a forward pass: first with the given arguments, then `again` with the kept ones.

    `calls` holds the calls of captured layers that await the second run, by layer and in order.
    """

    def __init__(self, block: nn.Module, forward: Callable, arguments: tuple[tuple, dict[str, Any]], copy: bool):
        self.block, self.forward, self.again = block, forward, False
        self.given: tuple[tuple, dict[str, Any]] | None = arguments
        self.kept: tuple[tuple, dict[str, Any]] | None = tree_map_only(Tensor, partial(_kept, copy=copy), arguments)
        self.versions = [tensor._version for tensor in self.tensors()]
        self.calls: defaultdict[str, deque] = defaultdict(deque)

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(self.kept) if isinstance(leaf, Tensor)]

    def run(self) -> Any:
        if self.given is not None:
            arguments, self.given = self.given, None
        else:  # on copies, since the block may change its arguments
            arguments, self.kept, self.again = tree_map_only(Tensor, Tensor.clone, self.kept), None, True
        args, kwargs = arguments
        return self.forward(*args, **kwargs)


def _kept(tensor: Tensor, copy: bool) -> Tensor:
    """Detach a tensor from its graph; it starts a new graph if it required gradients."""
    kept = tensor.detach()
    return (kept.clone() if copy else kept).requires_grad_(tensor.requires_grad)


class Checkpoints:
    """All calls of the blocks in one batch, and the current one."""

    def __init__(self):
        self.current: BlockRun | None = None
        self.runs: list[BlockRun] = []
        self.copied: set[nn.Module] = set()

    def forward_of(self, block: nn.Module) -> Callable:
        """Make a replacement for the block's forward function."""
        own = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = BlockRun(block, own, (args, kwargs), copy=block in self.copied)
            with set_checkpoint_early_stop(False):  # the rerun must reach all hooks, not stop at the last saved tensor
                output = checkpoint(partial(self.execute, run), use_reentrant=False, preserve_rng_state=False)
            if run.calls or any(tensor.requires_grad for tensor in run.tensors()):  # otherwise the graph begins later
                self.runs.append(run)
            return output

        return forward

    def execute(self, run: BlockRun) -> Any:
        """Run a block, for the first time or again."""
        self.current = run
        try:
            return run.run()
        finally:
            self.current = None

    def arguments_have_changed(self) -> bool:
        """Check whether the network changed a block's argument in place; from now on, copy that block's arguments."""
        changed = {run.block for run in self.runs if [tensor._version for tensor in run.tensors()] != run.versions}
        self.copied |= changed
        return bool(changed)

    @torch.no_grad()
    def finish(self) -> None:
        """Rerun the blocks that the backward pass did not rerun."""
        for run in self.runs:
            if not run.again:
                self.execute(run)
