"""Tokens: how many of them a block computes with, merged in the Fisher's metric (docs/methods.md).

Legend: N samples, T tokens of a sample, p protected ones among them (class, distillation, register tokens), D features,
k directions of the metric.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.cost.probe import Call
from facts.decomposition.truncation import Decomposition
from facts.estimators.base import Estimator, KroneckerFactors, TwoSidedEstimator
from facts.modules.lowrank import LinearLayer, LowRankLayer
from facts.modules.merging import by_ward
from facts.modules.tokens import (
    Merge,
    MergedBlock,
    MergingEntry,
    ObservedBlock,
    TokenStream,
    change_block,
)
from facts.moments.batch import LayerBatch
from facts.parts.base import Description, Found, Kind, Part, module_at
from facts.parts.token_checks import counts_sizes, entry_within, mixes_tokens, permutes

NUM_LEVELS = 8  # at which the loss of merging is measured
NUM_COUNTS = 64  # of tokens to choose from
SHARE_OF_DIRECTIONS = 4  # one in as many directions of the metric is kept
AT_ONCE = 8  # samples whose distances stay in a processor's cache: four times as fast as 40
FEWEST = 4  # tokens worth merging

PLACES = (
    "a block whose outputs depend on the places of its tokens, such as windows, convolutions, rotary positions, "
    "relative biases or a mask"
)
NOT_ALONE = "a block that cannot be run by itself, in float64"
AXES = "a block whose samples are not along the first axis"
COUNTS = "a block in which a token cannot count as several"
OWN = "a block whose tokens do not come from the data, such as queries"
UNKNOWN = (
    "which of its tokens do not come from the data cannot be told, since only one sample of integers is known: say how "
    "many there are at the front, facts.prepare(..., protected=1)"
)


@dataclass(frozen=True)
class Merging(Part):
    """The tokens of a block; a rank is the number that it passes on, with the `protected` ones.

    Those are at the places `fixed`, from the end if negative, or at the front if there are none.

    They are merged between attention and MLP if the block's code has an `entry`, the module that sees them there; the
    layers `behind` it compute with the merged ones. Otherwise they are merged before the block. It is one of `length`
    blocks in a list, after those in `stages`. `before` and `dense` count weights of the layers in front of the entry
    and behind it, if they are in no other part. Tokens are compared along `num_directions`; if there are none, by the
    cosine of their keys.
    """

    protected: int = 0
    fixed: tuple[int, ...] = ()
    size: int = 0
    entry: str = ""
    behind: tuple[str, ...] = ()
    length: int = 1
    before: int = 0
    num_directions: int = 0

    shortens = True

    @property
    def largest(self) -> int:
        return self.tokens

    @property
    def least(self) -> int:
        return self.protected + 1

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the protected tokens."""
        return self.fixed or tuple(range(self.protected))

    def rank_of_ratio(self, ratio: float) -> int:
        """The tokens left here if each block merges the same number, and a mean of `ratio` remain."""

        def left(hundredths: int) -> list[int]:
            return [max(self.least, self.tokens - hundredths * place // 100) for place in range(1, self.length + 1)]

        most = ratio * self.tokens * self.length
        enough = bisect_left(range(100 * self.tokens), True, key=lambda hundredths: sum(left(hundredths)) <= most)
        return left(enough)[len(self.stages)]

    def candidates(self, multiple: int, at_least: int, between: tuple[float, float]) -> list[int]:
        """Evenly spaced counts, in ascending order; what is wanted of ranks does not matter."""
        step = max(1, (self.tokens - self.protected) // NUM_COUNTS)
        return [*range(self.tokens - step, self.least, -step)][::-1]

    def num_weights(self, rank: int | None) -> int:
        return 0

    def flops(self, rank: int | None, plan: Mapping[str, int | None]) -> int:
        """Cost of the product with the metric and, if no other part has them, of the layers in the block."""
        entering = self.remaining(plan)
        going_on = entering if rank is None else min(rank, entering)
        metric = entering * self.num_directions * self.size if going_on < entering else 0
        return 2 * (self.before * entering + self.dense * going_on + metric)

    def weighed_by(self, estimator: Estimator) -> Self:
        return self if isinstance(estimator, TwoSidedEstimator) else replace(self, num_directions=0)

    def with_layers_of(self, model: nn.Module) -> Self:
        """The same part with the weights of all linear layers in its block."""
        layers = {
            f"{self.owner}.{name}": each.weight.numel()
            for name, each in model.get_submodule(self.owner).named_modules()
            if isinstance(each, LinearLayer)
        }
        behind = sum(size for name, size in layers.items() if not self.entry or name in self.behind)
        return replace(self, dense=behind, before=sum(layers.values()) - behind)

    def decompose(self, linear: nn.Module, factors: KroneckerFactors, row: float, col: float) -> Decomposition:
        """Leading directions of B, if any: a merge of two tokens loses the size-weighted (a - b)ᵀ B (a - b)."""
        if factors.B is None:
            return Decomposition(torch.zeros(self.size, 0), torch.zeros(0, self.size), torch.zeros(0))
        values, vectors = torch.linalg.eigh(factors.B.double())
        values, vectors = values.flip(0)[: self.num_directions].clamp(min=0), vectors.flip(1)[:, : self.num_directions]
        directions = (vectors * (values / values[0].clamp(min=torch.finfo(values.dtype).tiny)).sqrt()).mT.float()
        return Decomposition(directions.mT, directions, values)

    def truncated(self, linear: LinearLayer, decomposition: Decomposition, rank: int) -> LowRankLayer:
        assert isinstance(linear, TokenStream)
        return _MergedStream(linear, max(rank, self.least), decomposition.right)

    def slopes(self, batch: LayerBatch, decomposition: Decomposition) -> Tensor:
        """Changes of each sample's loss Σ_t g_t · Δx_t with each token that goes `[N, T]`, merged in several passes."""
        if batch.num_samples > AT_ONCE:
            parts = zip(batch.x.split(AT_ONCE), batch.g.split(AT_ONCE), strict=True)
            return torch.cat([self.slopes(LayerBatch(*part), decomposition) for part in parts])
        count, moves = self.tokens - self.protected, batch.g @ batch.x.mT
        moves = moves - moves.diagonal(dim1=1, dim2=2)[..., None]  # g_s · (x_t - x_s)
        features, losses = F.linear(batch.x, decomposition.right.to(batch.x)).float(), [moves.new_zeros(len(moves))]
        places = torch.arange(count, device=moves.device).expand(len(moves), -1)
        ones = sizes = torch.ones_like(features[..., 0])
        step = max(1, count // NUM_LEVELS)
        levels = [count, *range(count - step, 1, -step), 1]
        for before, number in pairwise(levels):
            choice = by_ward(features, sizes, ones[:, :before], number)
            (features, sizes), places = choice.merged(features, ones[:, :before]), choice.places.gather(1, places)
            together = torch.where(places[:, :, None] == places[:, None], moves, 0).sum(dim=2)
            losses.append((together / sizes.gather(1, places)).sum(dim=1))
        loss = torch.stack(losses, dim=1)  # [N, levels], from all tokens to one
        known = torch.tensor(levels, device=loss.device)
        wanted = torch.arange(count + 1, device=loss.device).clamp(min=1)
        upper = torch.searchsorted(-known, -wanted, right=True).clamp(1, len(levels) - 1)
        share = (known[upper - 1] - wanted) / (known[upper - 1] - known[upper])
        at_each = torch.lerp(loss[:, upper - 1], loss[:, upper], share.to(loss))
        at_each = torch.cat([at_each[:, :1].expand(-1, self.protected), at_each], dim=1)  # [N, T + 1]
        return at_each[:, :-1] - at_each[:, 1:]

    def put(self, model: nn.Module, rank: int, weights: Mapping[str, Decomposition] | None = None) -> None:
        block, like = model.get_submodule(self.owner), next(model.parameters())
        if weights is None:  # they are loaded later; along zeros, no tokens would be compared
            directions = torch.ones(self.num_directions, self.size, device=like.device)
        else:
            directions = weights[self.name].right.to(like.device, torch.float32).contiguous()
        merge = Merge(rank, self.tokens, self.places, directions, bool(self.entry))
        change_block(block, MergedBlock, merge, self.entry)
        blocks = list(model.get_submodule(self.owner.rpartition(".")[0]).children())
        for later in blocks[blocks.index(block) + 1 :]:
            if type(later) is type(block).__bases__[1]:  # others see all tokens, as between blocks
                change_block(later, MergedBlock, Merge())
        merges = [each.tokens for each in blocks if isinstance(each, MergedBlock)]
        for each in merges:
            each.state, each.is_first, each.is_last = merges[0].state, each is merges[0], each is merges[-1]

    def loads_without_facts(self) -> bool:
        return self.entry == "norm2" and self.num_directions > 0

    def rewrite(self, network: nn.Module, names: Collection[str]) -> None:
        taken = {place % self.tokens for place in self.places}
        free = [place for place in range(self.tokens) if place not in taken]
        stream = TokenStream(self.size, self.tokens, free, bool(self.entry), next(network.parameters()))
        change_block(network.get_submodule(self.owner), ObservedBlock, stream, self.entry)

    def stored_shapes(self, linear: LinearLayer) -> dict[str, tuple[int, ...]]:
        k = self.num_directions
        return {"left": (self.size, k), "right": (k, self.size), "energies": (k,), "num_repaired": ()}


class _MergedStream(TokenStream):
    """The tokens of a stream, merged and restored."""

    def __init__(self, stream: TokenStream, number: int, directions: Tensor):
        super().__init__(stream.in_features, stream.original, stream.free, stream.inside, stream.nothing)
        self.number, self.directions = number, directions

    def forward(self, x: Tensor) -> Tensor:
        fixed = tuple(sorted({*range(x.shape[1])} - {*self.free}))
        sizes, features = torch.ones_like(x[..., 0]).float(), F.linear(x.float(), self.directions.to(x.device))
        choice = by_ward(features, sizes, sizes, self.number, fixed)
        return choice.merged(x, sizes)[0].take_along_dim(choice.places[..., None], dim=1)


def set_tokens(model: nn.Module, counts: Mapping[str, int]) -> None:
    """Change how many tokens the blocks of a network with merged tokens go on with, in place.

    `counts` are by the names in its plan, `{"blocks.3.tokens": 171}`; no weight depends on them. Raises `ValueError`
    for other names, and for counts that a block cannot have.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"set_tokens needs a network, such as result.model, got {type(model).__name__}")
    blocks = _merging(model)
    for name, count in counts.items():
        if name not in blocks:
            raise ValueError(f"{name} merges no tokens: choose from {', '.join(blocks) or 'a network that does'}")
        merge = blocks[name].tokens
        if not isinstance(count, int) or not len(merge.fixed) < count <= merge.original:
            raise ValueError(f"{name} can have {len(merge.fixed) + 1} to {merge.original} tokens, not {count!r}")
    for name, count in counts.items():
        blocks[name].tokens.kept = count


def _merging(model: nn.Module) -> dict[str, MergedBlock]:
    """The blocks that merge tokens, by the names of these parts."""
    return {
        f"{owner}.tokens": block
        for owner, block in model.named_modules()
        if isinstance(block, MergedBlock) and block.tokens.directions is not None
    }


@dataclass(frozen=True)
class TokensOfBlocks(Kind):
    """Blocks in a list whose outputs permute with their tokens, and in which a token can count as several.

    The first `protected` tokens are never merged; without that, those that are `constant`: by module, the rows of its
    inputs that do not depend on the data (`Probe`). If one block of a list is `unfit`, since its tokens have places,
    others of its class are taken to be so too, without computing.
    """

    protected: int | None = None
    constant: Mapping[str, tuple[int, tuple[int, ...]]] | None = None
    unfit: set[tuple[str, type[nn.Module]]] = field(default_factory=set)
    results = 1

    def protecting(self, protected: int | None, constant: Mapping[str, Any] | None) -> Self:
        return type(self)(protected, constant)

    def sample(self, inputs: Any) -> Any:
        """The same inputs with a token masked (not the last), if a mask masks none: a later sample's may."""
        if not isinstance(inputs, Mapping):
            return inputs
        masks = {name: each.clone() for name, each in inputs.items() if "mask" in name and isinstance(each, Tensor)}
        for mask in masks.values():
            if mask.ndim == 2 and mask.shape[1] > 2 and mask.all():
                mask[:, -2] = 0
        return {**inputs, **masks}

    def layers_of(self, owner: str, module: nn.Module) -> list[str] | None:
        return [] if any(True for _ in module.children()) else None

    def find(self, model: nn.Module, owner: str, call: Call | None) -> Found:
        name, block = f"{owner}.tokens", model.get_submodule(owner)
        parent, tokens = owner.rpartition(".")[0], call and call[0] and call[0][0]
        if not call or not _is_entry(model, owner) or not isinstance(tokens, Tensor) or hasattr(block, "tokens"):
            return Found()
        if not tokens.is_floating_point() or tokens.ndim not in (3, 4):
            return Found()
        if tokens.ndim == 4 or len(tokens) != 1:
            return Found(reasons={name: PLACES if tokens.ndim == 4 else AXES})
        count, size = tokens.shape[1:]
        if (parent, type(block)) in self.unfit:
            return Found(reasons={name: PLACES})
        if count < FEWEST or (mixes := mixes_tokens(block, call)) is False:
            return Found()
        if (fixed := self._fixed(model, parent, count)) is None:
            return Found(reasons={name: UNKNOWN})
        if count - len(fixed) < FEWEST:
            return Found(reasons={name: OWN} if fixed else {})
        if mixes is None:
            return Found(reasons={name: NOT_ALONE})
        if not permutes(block, call, fixed):
            self.unfit.add((parent, type(block)))
            return Found(reasons={name: PLACES})
        directions = -(-size // SHARE_OF_DIRECTIONS)
        part = replace(_part(owner), tokens=count, protected=len(fixed), size=size, num_directions=directions)
        part = replace(part, fixed=() if fixed == part.places else fixed)
        entry, behind = entry_within(block, call)
        inside = replace(part, entry=entry, behind=tuple(f"{owner}.{layer}" for layer in behind))
        for each in (inside, part) if entry else (part,):
            alone = replace(each, name="0.tokens", owner="0", tokens=count + 1, protected=0, fixed=())
            if counts_sizes(block, call, alone):  # and if all are left, the network is the same
                return Found((each,), changes=(lambda network: None, partial(each.put, rank=count)))
        return Found(reasons={name: COUNTS})

    def _fixed(self, model: nn.Module, parent: str, count: int) -> tuple[int, ...] | None:
        """Places of the tokens in a list of blocks that do not come from the data, from the end if that is nearer.

        They are those of the first block's inputs, and of other modules' with as many tokens, such as an earlier list
        of blocks. None if it cannot be told.
        """
        if self.protected is not None:
            return tuple(range(self.protected))
        if self.constant is None:
            return None
        first = f"{parent}.{next(name for name, _ in model.get_submodule(parent).named_children())}"
        places = {*self.constant.get(first, (0, ()))[1]}
        for number, rows in self.constant.values():
            places |= {*rows} if number == count > len(rows) else set()
        return tuple(sorted(place if 2 * place < count else place - count for place in places))

    def at(self, model: nn.Module, name: str) -> Part | None:
        owner, _, last = name.rpartition(".")
        return _part(owner) if last == "tokens" and module_at(model, owner) and _is_entry(model, owner) else None

    def described(self, model: nn.Module) -> dict[str, Description]:
        found: dict[str, Description] = {}
        for name, block in _merging(model).items():
            merge, (num_directions, size) = block.tokens, block.tokens.directions.shape
            entry = next((within for within, each in block.named_modules() if isinstance(each, MergingEntry)), "")
            fixed = () if merge.fixed == tuple(range(len(merge.fixed))) else merge.fixed
            found[name] = Description(merge.original, len(merge.fixed), size, entry, num_directions, fixed=fixed)
        return found

    def linked(self, model: nn.Module, found: list[Part], reasons: dict[str, str]) -> list[Part]:
        """Leave out blocks that hold others; say which blocks come before each part, also to layers within blocks."""
        owners = [part.owner for part in found if part.shortens]
        alone = len(owners) == len(found)
        candidates = [*owners, *(name.removesuffix(".tokens") for name in reasons if name.endswith(".tokens"))]
        outer = {each for each in candidates if any(other.startswith(f"{each}.") for other in candidates)}
        for owner in outer:
            reasons.pop(f"{owner}.tokens", None)
        found = [part for part in found if not (part.shortens and part.owner in outer)]
        chains, blocks = defaultdict[str, list[Merging]](list), dict[str, Merging]()
        for part in found:
            if isinstance(part, Merging):
                chains[part.owner.rpartition(".")[0]].append(part)
        for chain in chains.values():
            names = tuple(each.name for each in chain)
            for place, each in enumerate(chain):
                block = replace(each, stages=names[:place], length=len(chain))
                blocks[each.name] = block.with_layers_of(model) if alone else block
        return [blocks.get(part.name) or _within(part, blocks.values()) for part in found]


def _within(part: Part, blocks: Iterable[Merging]) -> Part:
    """The same part, of whichever kind, with the stages that leave it tokens."""
    layer = (part.owner, *part.layers)[-1]
    block = next((each for each in blocks if layer.startswith(f"{each.owner}.")), None)
    if block is None or part.rows < block.tokens:  # it does not see the tokens one by one
        return part
    is_before = block.entry and layer not in block.behind
    return replace(part, stages=block.stages if is_before else (*block.stages, block.name), tokens=block.tokens)


def _part(owner: str) -> Merging:
    return Merging(f"{owner}.tokens", owner, (), (f"{owner}.tokens",), 0)


def _is_entry(model: nn.Module, owner: str) -> bool:
    parent = owner.rpartition(".")[0]
    return isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential)
