"""Which tokens merge: those that are alike, by Ward's rule or as Token Merging does it.

Legend: N samples, n tokens, m of them after merging, k features by which they are compared.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

THIRD = 2.0  # factor on the cost of a token whose nearest has a nearer one, since they would be three
LAST = 1e28  # in place of the cost of the token that stays of a pair


class Choice(NamedTuple):
    """Which of n tokens go into which of m: `places [N, n]`, and one that each comes from, `kept [N, m]`.

    `members [N, m, n]` are the weights of those that go there; without them, all but the kept ones are left out.
    """

    places: Tensor
    kept: Tensor
    members: Tensor | None = None

    def merged(self, x: Tensor, per_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted means `[N, m, D]` of tokens, and their numbers of originals `[N, m]`.

        `per_weight [N, n]` is how many originals weigh as much as one.
        """
        if self.members is None:
            kept = self.kept[..., None].expand(-1, -1, x.shape[-1])
            return x.gather(1, kept), constant(torch.ones, 1, x.device).expand(self.kept.shape)
        one = constant(torch.ones, 1, x.device).expand(*x.shape[:2], 1)
        columns = torch.cat([x, one, per_weight[..., None]], dim=-1)  # in one product, since each is a kernel
        sums = self.members.to(columns.dtype) @ columns
        return (sums[..., :-2] / sums[..., -2:-1]).to(x.dtype), sums[..., -1].detach().float()


def by_ward(features: Tensor, sizes: Tensor, per_weight: Tensor, number: int, fixed: tuple[int, ...] = ()) -> Choice:
    """Merge tokens by Ward's rule until `number` remain; those at the places `fixed` stay, and end up last.

    The weight of a token is its size `[N, n]` over `per_weight`, the number of originals for a unit of weight.
    Merging tokens a and b of weights v and w costs v w / (v + w) ‖a - b‖², by `features [N, n, k]` in float32. Tokens
    leave in the order of this cost with their nearest, at equal costs in their own, and merge with the nearest that
    stays. Of two that are each other's nearest, only the later one leaves; other tokens count as `THIRD` as expensive.
    """
    order = constant(torch.arange, features.shape[1], features.device)
    inverse, products = per_weight / sizes, features @ features.mT
    squares = products.diagonal(dim1=1, dim2=2)
    gaps = (squares[:, :, None] + squares[:, None]).sub_(products, alpha=2)
    apart = constant(_apart, features.shape[1], fixed, features.device)
    costs = torch.addcdiv(apart, gaps, inverse[:, :, None] + inverse[:, None])
    least, nearest = costs.min(dim=-1)  # the first of equal ones
    in_pair = nearest.gather(1, nearest) == order
    leaves_at = torch.where(in_pair, least.masked_fill(nearest > order, LAST), THIRD * least)
    kept = leaves_at.sort(dim=-1, stable=True).indices[:, features.shape[1] - number :]
    into = costs.gather(2, kept[:, None].expand_as(costs[..., :number])).argmin(dim=-1)
    places = into.scatter(1, kept, order[:number].expand_as(kept))
    return Choice(places, kept, (places[:, None] == order[:number, None]) / inverse[:, None])


def in_order(sizes: Tensor, number: int, fixed: tuple[int, ...] = ()) -> Choice:
    """Keep the first free tokens, the last of them in the place of those left out; the fixed tokens end up last."""
    free = [place for place in range(sizes.shape[1]) if place not in {*fixed}]
    stay = number - len(fixed)
    into = {place: min(rank, stay - 1) for rank, place in enumerate(free)}
    into |= {place: stay + rank for rank, place in enumerate(fixed)}
    kept = constant(torch.tensor, (*free[:stay], *fixed), sizes.device)
    places = constant(torch.tensor, tuple(into[place] for place in range(sizes.shape[1])), sizes.device)
    return Choice(places.expand(sizes.shape[0], -1), kept.expand(sizes.shape[0], -1))


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
    with torch.inference_mode(False):  # or no later backward pass could use it
        return make(*args[:-1], device=args[-1])


def _apart(number: int, fixed: tuple[int, ...], device: torch.device) -> Tensor:
    """What is added to increases `[n, n]`: infinity for a token and itself, and for a fixed one and any other."""
    added = torch.eye(number, device=device)
    for place in fixed:
        added[place] = added[:, place] = 1
    return torch.where(added > 0, torch.inf, 0.0)
