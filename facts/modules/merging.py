"""Which tokens merge: those that are alike, by Ward's rule or as Token Merging does it.

Legend: N samples, n tokens, m of them after merging, k features by which they are compared.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SINGLE_PASS = 0.2  # largest share of the tokens that one pass merges; larger ones take two
LATE = 1e14  # factor on increases that are merged after those of all reciprocal pairs
LAST = LATE**2  # in place of the increase of the token that stays of such a pair


class Choice(NamedTuple):
    """Which of n tokens go into which of m: `places [N, n]`, and one that each comes from, `kept [N, m]`.

    `members [N, m, n]` are the weights of those that go there.
    """

    places: Tensor
    kept: Tensor
    members: Tensor

    def merged(self, x: Tensor, per_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted means `[N, m, D]` of tokens, and their numbers of originals `[N, m]`.

        `per_weight [N, n]` is how many originals weigh as much as one.
        """
        one = constant(torch.ones, 1, x.device).expand(*x.shape[:2], 1)
        columns = torch.cat([x, one, per_weight[..., None]], dim=-1)  # in one product, since each is a kernel
        sums = self.members.to(columns.dtype) @ columns
        return (sums[..., :-2] / sums[..., -2:-1]).to(x.dtype), sums[..., -1].detach().float()


def schedule(number: int, excess: int) -> list[int]:
    """Numbers of tokens that leave in each pass if `excess` of `number` do."""
    return [excess] if excess <= max(1, SINGLE_PASS * number) else [excess // 2, excess - excess // 2]


def by_ward(
    features: Tensor, sizes: Tensor, per_weight: Tensor, passes: Sequence[int], fixed: tuple[int, ...] = ()
) -> Choice:
    """Merge tokens by Ward's rule, as many in each pass as `passes` say; those at the places `fixed` stay.

    The weight of a token is its size `[N, n]` over `per_weight`, the number of originals for a unit of weight.
    Merging tokens a and b of weights v and w costs v w / (v + w) ‖a - b‖², by `features [N, n, k]` in float32. Pairs
    that are each other's nearest merge first, the cheapest first, then the cheapest others with the nearest that stays;
    at equal costs, in the order of tokens. Each pass goes on with weighted means. The fixed tokens end up last.
    """
    order = constant(torch.arange, features.shape[1], features.device)
    means, inverse = features, (all_inverse := per_weight / sizes)
    places = kept = members = None
    for leaving in passes:
        if members is not None:
            columns = torch.cat([features, constant(torch.ones, 1, features.device).expand(*sizes.shape, 1)], dim=-1)
            sums = members @ columns
            inverse = sums[..., -1].reciprocal()
            means = sums[..., :-1] * inverse[..., None]
            fixed = tuple(range(means.shape[1] - len(fixed), means.shape[1]))
        step, stay = _pass(means, inverse, leaving, fixed, order[: means.shape[1]])
        places = step if places is None else step.gather(1, places)
        kept = stay if kept is None else kept.gather(1, stay)
        members = (places[:, None] == order[: stay.shape[1], None]) / all_inverse[:, None]
    assert places is not None and kept is not None and members is not None
    return Choice(places, kept, members)


def _pass(means: Tensor, inverse: Tensor, leaving: int, fixed: tuple[int, ...], order: Tensor) -> tuple[Tensor, Tensor]:
    """Let `leaving` tokens go into others; return the new places `[N, n]`, and those that stay `[N, n - leaving]`."""
    products = means @ means.mT
    squares = products.diagonal(dim1=1, dim2=2)
    gaps = (squares[:, :, None] + squares[:, None]).sub_(products, alpha=2)
    apart = constant(_apart, means.shape[1], fixed, means.device)
    increases = torch.addcdiv(apart, gaps, inverse[:, :, None] + inverse[:, None])
    least, nearest = increases.min(dim=-1)  # the first of equal ones
    of_pair = least.masked_fill(nearest > order, LAST)
    late = torch.where(nearest.gather(1, nearest) == order, of_pair, LATE * least)
    stay = late.sort(dim=-1, stable=True).indices[:, leaving:]
    nearest = increases.gather(2, stay[:, None].expand(-1, means.shape[1], -1)).argmin(dim=-1)
    return nearest.scatter(1, stay, order[: stay.shape[1]].expand_as(stay)), stay


def in_order(sizes: Tensor, number: int, fixed: tuple[int, ...] = ()) -> Choice:
    """Keep the first of the free tokens and put all others into the last of these; the fixed tokens end up last."""
    free = [place for place in range(sizes.shape[1]) if place not in {*fixed}]
    stay = number - len(fixed)
    into = {place: min(rank, stay - 1) for rank, place in enumerate(free)}
    into |= {place: stay + rank for rank, place in enumerate(fixed)}
    kept = constant(torch.tensor, (*free[:stay], *fixed), sizes.device)
    places = constant(torch.tensor, tuple(into[place] for place in range(sizes.shape[1])), sizes.device)
    members = (places == constant(torch.arange, number, sizes.device)[:, None]) * sizes[:, None]
    return Choice(places.expand(sizes.shape[0], -1), kept.expand(sizes.shape[0], -1), members)


def as_published(keys: Tensor, sizes: Tensor, number: int, fixed: tuple[int, ...] = ()) -> Choice:
    """Merge tokens until `number` remain, as Token Merging does (Bolya et al., ICLR 2023), half of them in each pass.

    Tokens are dealt out alternately; each of the first kind leaves for the most similar of the second by
    `keys [N, n, d]`, the most similar first. The fixed tokens end up last.
    """
    free = [place for place in range(keys.shape[1]) if place not in {*fixed}]
    kept = torch.tensor([*free, *fixed], device=keys.device).expand(keys.shape[0], -1)
    places, members = torch.argsort(kept, dim=1), torch.eye(keys.shape[1], device=keys.device)[kept] * sizes[:, None]
    while (excess := kept.shape[1] - number) > 0:
        free_ones = F.normalize(members @ keys, dim=-1)[:, : kept.shape[1] - len(fixed)]
        alike, nearest = (free_ones[:, ::2] @ free_ones[:, 1::2].mT).max(dim=-1)
        leaving = min(excess, free_ones.shape[1] // 2)
        left = 2 * alike.sort(dim=-1, stable=True, descending=True).indices[:, :leaving]
        into = 1 + 2 * nearest.gather(1, left // 2)
        stays = torch.ones_like(kept).scatter(1, left, 0)
        stay = stays.sort(dim=-1, stable=True, descending=True).indices[:, : kept.shape[1] - leaving]
        step = stays.cumsum(1) - 1
        step = step.scatter(1, left, step.gather(1, into))
        places, kept = step.gather(1, places), kept.gather(1, stay)
        members = (places[:, None] == constant(torch.arange, kept.shape[1], keys.device)[:, None]) * sizes[:, None]
    return Choice(places, kept, members)


def rule_for(directions: Tensor) -> Callable[..., Choice]:
    """The rule for tokens compared along these directions: as published without any, in order if all are zero."""
    if not len(directions):
        return as_published
    return by_ward if directions.is_meta or bool(directions.any()) else in_order


def constant(make: Callable[..., Tensor], *args: Any) -> Tensor:
    """A tensor made of sizes and, last, a device; it is kept, except within a trace and on the meta device."""
    traced = torch.compiler.is_compiling() or args[-1].type == "meta"
    return make(*args[:-1], device=args[-1]) if traced else _kept(make, *args)


@functools.lru_cache(maxsize=256)
def _kept(make: Callable[..., Tensor], *args: Any) -> Tensor:
    return make(*args[:-1], device=args[-1])


def _apart(number: int, fixed: tuple[int, ...], device: torch.device) -> Tensor:
    """What is added to increases `[n, n]`: infinity for a token and itself, and for a fixed one and any other."""
    added = torch.eye(number, device=device)
    for place in fixed:
        added[place] = added[:, place] = 1
    return torch.where(added > 0, torch.inf, 0.0)
