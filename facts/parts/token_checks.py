"""What a block does with its tokens, asked by computing: whether it mixes and permutes them, and counts their sizes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from facts.cost.probe import Call
from facts.decomposition.truncation import Decomposition
from facts.modules.lowrank import LinearLayer
from facts.modules.networks import evaluating, hooked
from facts.modules.tokens import Clusters
from facts.parts.base import Part, are_same, in_float64


def _run(block: nn.Module, call: Call, tokens: Tensor) -> Tensor:
    (_, *others), kwargs = call
    outputs = block(tokens, *others, **kwargs)
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _in_float64(check: Callable[..., bool]) -> Callable[..., bool | None]:
    """Let a check of a block and a call run in float64; it returns None if the block cannot be run in that way."""

    @torch.no_grad()
    def checked(block: nn.Module, call: Call, *others: Any) -> bool | None:
        block, call = in_float64(block, call)
        try:
            return check(block, call, *others)
        except Exception:  # from anyone's code
            return None

    return checked


@_in_float64
def mixes_tokens(block: nn.Module, call: Call) -> bool:
    """Whether a token's output depends on another token."""
    tokens = call[0][0]
    other = tokens.clone()
    other[:, -1] = -other[:, -1]
    one, changed = _run(block, call, tokens), _run(block, call, other)
    return one.shape == tokens.shape and not one[:, :-1].equal(changed[:, :-1])


@_in_float64
def permutes(block: nn.Module, call: Call, fixed: tuple[int, ...]) -> bool:
    """Whether outputs permute with the tokens that are not fixed."""
    tokens, order = call[0][0], torch.arange(call[0][0].shape[1])
    free = [place for place in order.tolist() if place not in {each % len(order) for each in fixed}]
    order[free] = order[free][torch.randperm(len(free), generator=torch.Generator().manual_seed(0))]
    order = order.to(tokens.device)
    return are_same(_run(block, call, tokens)[:, order], _run(block, call, tokens[:, order]))


def entry_within(block: nn.Module, call: Call) -> tuple[str, tuple[str, ...]]:
    """Where tokens can merge inside a block, and the linear layers behind it; no name if its modules do not show it.

    It is the last normalisation before the last linear layer.
    """
    names, seen = {module: name for name, module in block.named_modules()}, list[nn.Module]()

    def note(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim == 3 and len(args[0]) == 1:
            seen.append(module)

    leaves = [module for module in names if isinstance(module, LinearLayer) or not any(True for _ in module.children())]
    with torch.no_grad(), evaluating(block), hooked((module, note) for module in leaves):
        _run(block, call, call[0][0])
        sizes = list(map(_size_of, seen))  # in evaluation mode, since reading a parametrized weight may change it
    linears = [place for place, module in enumerate(seen) if isinstance(module, LinearLayer)]
    norms = [
        place for place, size in enumerate(sizes) if size == call[0][0].shape[-1] and place < max(linears, default=0)
    ]
    if not norms or seen.count(seen[norms[-1]]) > 1:
        return "", ()
    return names[seen[norms[-1]]], tuple(names[seen[place]] for place in linears if place > norms[-1])


def _size_of(module: nn.Module) -> int | None:
    """The number of features that a normalisation expects, None if it is no normalisation."""
    weight = getattr(module, "weight", None)
    return len(weight) if isinstance(weight, Tensor) and weight.ndim == 1 else None


@_in_float64
def counts_sizes(block: nn.Module, call: Call, part: Part) -> bool:
    """Whether one token of size 2 has the effect of two equal ones, also if the block merges them itself.

    The part is of the block as the only one of a list, with one token more and none protected.
    """
    tokens = call[0][0]
    twice = torch.cat([tokens, tokens[:, -1:]], dim=1)
    expected, count = _run(block, call, twice), tokens.shape[1]
    places = torch.arange(count + 1, device=tokens.device).clamp(max=count - 1)[None]
    sizes = torch.ones(1, count, device=tokens.device).index_add(1, places[0, -1:], torch.ones(1, 1).to(tokens.device))
    eye = torch.eye(tokens.shape[-1], dtype=tokens.dtype, device=tokens.device)
    part.put(nn.ModuleList([block]), count, {"0.tokens": Decomposition(eye, eye, eye[0])})
    outputs = [_run(block, call, twice)]
    merge, rows = block.tokens, torch.arange(count, device=tokens.device)[None]
    merge.is_first, merge.kept = False, count + 1
    merge.state.known[twice.untyped_storage()] = Clusters(sizes, sizes.log()[:, None, None], rows, places)
    outputs.append(_run(block, call, twice))
    return all(are_same(expected, each) for each in outputs)
