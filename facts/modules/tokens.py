"""Blocks that merge tokens: fewer go on, each standing for several; attention counts each as often as that.

Legend: N samples, T original tokens, n merged ones, D features, p protected tokens at the front, k directions.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import without_autocast

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__)
NO_MASKS = (
    "this network merges tokens, so none can be masked: compress it with data that have such masks, or parts='units'"
)
MERGED = "facts_merged"  # attribute of a block's outputs


@dataclass(frozen=True)
class Assignment:
    """One pass of merging n tokens into m: the `places [N, n]` where each goes, and the new `sizes [N, m]`.

    `shares [N, m, n]` are each token's part in a new one: its size over the new one's, zero elsewhere. Merging is a
    product with them: to add the few rows that change takes as long on a CPU, and twice as many launches on a GPU.
    """

    places: Tensor
    sizes: Tensor
    shares: Tensor

    @classmethod
    def nearest(cls, features: Tensor, sizes: Tensor, number: int, num_protected: int, by_cosine: bool = False) -> Self:
        """Merge `number` pairs, each token of the first kind with its nearest of the second by `features [N, n, k]`.

        Tokens are dealt out alternately after the first `num_protected`: the first kind leaves, the second takes.
        The distance of tokens a and b of sizes s and t is the increase s t / (s + t) ‖a - b‖², Ward's rule
        (docs/methods.md), or their negative cosine. Equal distances are taken in the order of positions.
        """
        first, second = slice(num_protected, None, 2), slice(num_protected + 1, None, 2)
        features = F.normalize(features, dim=-1) if by_cosine else features
        leaving, taking = features[:, first], features[:, second]
        if by_cosine:
            distances = -leaving @ taking.mT
        else:
            squares, inverse = features.square().sum(-1), sizes.reciprocal()
            of_both = squares[:, first, None] + squares[:, None, second]
            distances = torch.baddbmm(of_both, leaving, taking.mT, alpha=-2)
            distances = distances / (inverse[:, first, None] + inverse[:, None, second])
        least, nearest = distances.min(dim=-1)  # the first of equal ones
        left = least.sort(dim=-1, stable=True).indices[:, :number]
        into = num_protected + 1 + 2 * nearest.gather(1, left)
        left = num_protected + 2 * left
        stays = torch.ones_like(sizes, dtype=torch.int64).scatter(1, left, 0)
        places = stays.cumsum(1) - 1
        places = places.scatter(1, left, places.gather(1, into))
        members = sizes.new_zeros(sizes.shape[0], sizes.shape[1] - number, sizes.shape[1])
        members = members.scatter(1, places[:, None], sizes[:, None])
        sizes = members.sum(-1)
        return cls(places, sizes, members / sizes[..., None])

    def merged(self, x: Tensor) -> Tensor:
        """Means `[N, m, D]` of tokens, weighted by their sizes."""
        return self.shares.to(x.dtype) @ x

    def summed(self, x: Tensor) -> Tensor:
        """Sums `[N, m, D]` of tokens."""
        return (self.shares > 0).to(x.dtype) @ x


@dataclass(frozen=True)
class Tokens:
    """Merged tokens `x [N, n, D]`, the number of originals of each, `sizes [N, n]`, and each original's `places`.

    `places [N, T]` are positions among the merged tokens.
    """

    x: Tensor
    sizes: Tensor
    places: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """The merged tokens of a block's outputs; tokens from elsewhere stand for themselves."""
        merged = getattr(x, MERGED, None)
        if merged is not None:
            return merged
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        return cls(x, torch.ones(x.shape[:2], dtype=torch.float32, device=x.device), places)

    @torch.no_grad()
    def passes(
        self, number: int, num_protected: int, directions: Tensor, keys: Tensor | None = None
    ) -> list[Assignment]:
        """Choose what to merge, the nearest first, until `number` tokens remain: half of them in each pass.

        The distance is Ward's increase along `directions [k, D]`, or the cosine of `keys [N, n, d]` (Bolya et al.,
        "Token Merging", ICLR 2023).
        """
        passes: list[Assignment] = []
        with without_autocast(self.x.device):
            features = F.linear(self.x.float(), directions.float()) if keys is None else keys.float()
            sizes, by_cosine = self.sizes, keys is not None
            while (excess := sizes.shape[1] - number) > 0:
                most = (sizes.shape[1] - num_protected) // 2
                if passes:
                    features = passes[-1].merged(features)
                passes.append(Assignment.nearest(features, sizes, min(excess, most), num_protected, by_cosine))
                sizes = passes[-1].sizes
        return passes

    def merged(self, passes: Iterable[Assignment]) -> Self:
        """Merge in each pass in turn."""
        x, sizes, places = self.x, self.sizes, self.places
        with without_autocast(x.device):
            for each in passes:
                x, sizes, places = each.merged(x), each.sizes, each.places.gather(1, places)
        return type(self)(x, sizes, places)

    def restored(self) -> Tensor:
        """Give each original token its merged one `[N, T, D]`; the next block takes the merged ones from this."""
        restored = rows_at(self.x, self.places)
        setattr(restored, MERGED, self)
        return restored


def rows_at(x: Tensor, positions: Tensor) -> Tensor:
    """Rows `[N, n, D]` of each sample at these positions `[N, n]`, in a tenth of the time that `gather` takes."""
    starts = x.shape[1] * torch.arange(x.shape[0], device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, (starts + positions).flatten()).view(*positions.shape, -1)


@dataclass
class Passage:
    """One call of a block: its `tokens`, and those that its entry has `seen` before it merged them.

    `keys [N, heads, n, d]` are those of the last attention, if the block calls `scaled_dot_product_attention`.
    """

    tokens: Tokens
    seen: Tensor | None = None
    keys: Tensor | None = None


class ProportionalAttention(TorchFunctionMode):
    """Within it, attention counts each key as often as its size, by adding the logarithm to its scores.

    After the entry has merged tokens, additions to the unmerged ones (the residual connection) take the merged ones.
    """

    def __init__(self, passage: Passage):
        super().__init__()
        self.passage, self.bias = passage, passage.tokens.sizes.log()[:, None, None, :]

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        passage = self.passage
        if func in ADDITIONS and passage.seen is not None:
            args = tuple(passage.tokens.x if each is passage.seen else each for each in args)
        if func is F.scaled_dot_product_attention:
            query, key, value, *others = args
            passage.keys = key
            mask = others.pop(0) if others else kwargs.pop("attn_mask", None)
            if mask is not None and mask.shape[-1] not in (1, key.shape[-2]):
                raise ValueError(NO_MASKS)
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
            bias = self.bias.to(query.dtype)
            return func(query, key, value, bias if mask is None else bias + mask, *others, **kwargs)
        if func in SOFTMAX and args[0].ndim == 4 and args[0].shape[-1] == self.bias.shape[-1]:
            return func(args[0] + self.bias.to(args[0].dtype), *args[1:], **kwargs)
        return func(*args, **kwargs)


class Merge(nn.Module):
    """Choose tokens to merge until `kept` remain of the `original` ones; other image sizes keep the same share.

    Without `directions`, a block goes on with what an earlier one has merged. With 0 of them, tokens are merged by the
    cosine of their keys, which are known only `inside` the block, where its entry sees the tokens.
    """

    def __init__(
        self,
        kept: int = 0,
        original: int = 0,
        num_protected: int = 0,
        directions: Tensor | None = None,
        inside: bool = False,
    ):
        super().__init__()
        self.kept, self.original, self.num_protected, self.inside = kept, original, num_protected, inside
        self.register_buffer("directions", directions)
        self.passages: dict[int, Passage] = {}  # by thread

    def forward(self, tokens: Tokens, keys: Tensor | None = None) -> list[Assignment]:
        """Choose the passes; none without directions."""
        if self.directions is None:
            return []
        free, all_free = self.kept - self.num_protected, self.original - self.num_protected
        here = tokens.places.shape[1] - self.num_protected
        number = self.num_protected + max(1, (2 * here * free + all_free) // (2 * all_free))
        if len(self.directions):
            return tokens.passes(number, self.num_protected, self.directions)
        if keys is None:
            raise ValueError(
                "the keys of this attention are not seen, since it does not call scaled_dot_product_attention or is "
                "after the merging: take an estimator of both sides, such as facts"
            )
        return tokens.passes(number, self.num_protected, self.directions, keys.mean(dim=1))

    def num_operations(self, tokens: Tokens, passes: list[Assignment]) -> int:
        """Operations of the product with the metric, if it merges any; to add up the merged tokens does not count."""
        return 2 * tokens.x.numel() * len(self.directions) if passes else 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"passages": {}}

    def extra_repr(self) -> str:
        return "" if self.directions is None else f"kept={self.kept}, original={self.original}, inside={self.inside}"


def _thread() -> int:
    """Return the number of this thread, by which calls of one network are kept apart; a compiler follows only one."""
    return 0 if torch.compiler.is_compiling() else get_ident()


class TokenStream(LowRankLayer):
    """The tokens that are to be merged, as outputs of a layer, so that a data pass sees their gradients.

    Those of the first `num_protected` are left out of it. `moved` is by how much another forward function moves them.
    """

    bias = None
    rank = num_weights = 0

    def __init__(self, size: int, num_protected: int, inside: bool, like: Tensor):
        super().__init__()
        self.in_features = self.out_features = size
        self.num_protected, self.inside = num_protected, inside
        self.nothing = nn.Parameter(like.new_empty(0), requires_grad=False)  # has the device and type of a weight
        self.moved: Tensor | None = None

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.nothing.new_empty(self.out_features, 0), self.nothing.new_empty(0, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return x  # not a view: the gradient is that of all uses of these tokens


class Changed(nn.Module):
    """Base of modules with another behaviour before that of their own class; `tokens` are their block's."""

    tokens: Any
    of_entry: type["Changed"]
    """The behaviour of the module of a changed block that sees its tokens after attention."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, type(self).__bases__, self.__dict__


class MergingEntry(Changed):
    """The first module after a block's attention, of merged tokens."""

    def forward(self, x: Tensor) -> Any:
        merge, passage = self.tokens, self.tokens.passages[_thread()]
        passage.seen, tokens = x, replace(passage.tokens, x=x)
        passage.tokens = tokens.merged(merge(tokens, passage.keys))
        return super().forward(passage.tokens.x)


class MergedBlock(Changed):
    """A block that merges tokens at its beginning or inside; its outputs give each original token its merged one's."""

    tokens: Merge
    of_entry = MergingEntry

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens, merge = Tokens.of(x), self.tokens
        if not merge.inside:
            tokens = tokens.merged(merge(tokens))
        merge.passages[_thread()] = passage = Passage(tokens)
        try:
            with ProportionalAttention(passage):
                outputs = super().forward(tokens.x, *args, **kwargs)
        finally:
            del merge.passages[_thread()]
        first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        restored = replace(passage.tokens, x=first).restored()
        return (restored, *others) if isinstance(outputs, tuple) else restored


class ObservedEntry(Changed):
    """The first module after a block's attention; the block adds the difference if the stream moves its inputs."""

    def forward(self, x: Tensor) -> Any:
        streamed = self.tokens(x)
        if streamed is not x:
            self.tokens.moved = streamed - x
        return super().forward(streamed)


class ObservedBlock(Changed):
    """A block whose tokens pass through a `TokenStream`, at its beginning or where its entry sees them."""

    tokens: TokenStream
    of_entry = ObservedEntry

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # so that the gradient at the entry is that of all uses
        if not self.tokens.inside:
            return super().forward(self.tokens(x), *args, **kwargs)
        outputs, moved = super().forward(x, *args, **kwargs), self.tokens.moved
        self.tokens.moved = None
        if moved is None:
            return outputs
        return (outputs[0] + moved, *outputs[1:]) if isinstance(outputs, tuple) else outputs + moved


def change_block(block: nn.Module, behaviour: type[Changed], tokens: nn.Module, entry: str = "") -> None:
    """Let a block of any class, and its module `entry`, behave in another way too; the block's `tokens` say how."""
    _change(block, behaviour)
    block.tokens = tokens
    if entry:
        module = block.get_submodule(entry)
        _change(module, behaviour.of_entry)
        module.__dict__["tokens"] = tokens  # which stay a module of the block


def _change(module: nn.Module, behaviour: type[Changed]) -> None:
    own = type(module).__bases__[1] if isinstance(module, Changed) else type(module)
    module.__class__ = _combined(behaviour, own)  # type: ignore[arg-type]


@functools.cache
def _combined(behaviour: type[Any], own: type[Any]) -> type[Any]:
    return type(f"{behaviour.__name__}{own.__name__}", (behaviour, own), {})


def _new(behaviour: type[Any], own: type[Any]) -> Any:
    return object.__new__(_combined(behaviour, own))  # type: ignore[arg-type]
