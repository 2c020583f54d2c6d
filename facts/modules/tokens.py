"""Blocks with fewer tokens: alike ones are merged, and attention counts each as often as it has originals.

Between blocks all tokens have their places: a merged token's value stands at each of its originals.

Legend: N samples, T original tokens, n merged ones, D features, k directions of the metric.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from facts.modules.lowrank import LowRankLayer
from facts.modules.merging import Choice, as_published, by_ward, constant, in_order, rule_for
from facts.modules.networks import without_autocast

log = logging.getLogger(__name__)

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__)
NO_MASKS = (
    "this network merges tokens, so none can be masked: compress it with data that have such masks, or parts='units'"
)
TINY = torch.finfo(torch.float32).tiny  # so that a token that receives no attention has a weight, too
ATTENTION = 0.25  # power of the attention that a token receives from all tokens, and from the fixed ones, in its weight


class Clusters(NamedTuple):
    """Merged tokens as groups of originals: their `sizes [N, n]`, and the logarithms of these, `bias [N, 1, 1, n]`.

    Where tokens are left out, there is no bias. `rows [N, n]` and `places [N, T]` count on from sample to sample: where
    one original of each token is, and where each original's token is.
    """

    sizes: Tensor
    bias: Tensor | None
    rows: Tensor
    places: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The merged tokens `[N, n, D]` among all places `[N, T, D]`."""
        return _rows(x, self.rows)

    def restored(self, x: Tensor) -> Tensor:
        """Give each original `[N, T, D]` the value of its merged token."""
        return _rows(x, self.places)


def _rows(x: Tensor, positions: Tensor) -> Tensor:
    """Rows of all samples, in a tenth of the time that `gather` takes on a CPU."""
    return x.flatten(0, 1).index_select(0, positions.flatten()).view(*positions.shape, x.shape[-1])


class MergeState:
    """The clusters of the tokens that are on their way through one list of blocks.

    They are known by the memory of a block's inputs, so that it can run again, as checkpointing does, and so that two
    sequences can be on their way. If that is new, since a hook or a cast has copied what the block before gave, it is
    those that this block left in the same thread.
    """

    def __init__(self) -> None:
        self.known, self.left = WeakIdKeyDictionary(), dict[int, Clusters | None]()

    def __reduce__(self) -> tuple[Any, ...]:
        return MergeState, ()

    def of(self, x: Tensor) -> Clusters | None:
        """The clusters of a block's inputs `[N, T, D]`."""
        left = self.left.get(_thread())
        if torch.compiler.is_compiling():
            return left
        found = self.known.get(x.untyped_storage(), left)
        if found is None or found.places.shape != x.shape[:2]:
            return None
        if found.rows.device != x.device:  # the blocks are on several
            found = tree_map_only(Tensor, lambda each: each.to(x.device), found)
        self.known[x.untyped_storage()] = found
        return found

    def leave(self, x: Tensor, clusters: Clusters | None, is_last: bool) -> None:
        """Note the clusters of a block's outputs."""
        if is_last:
            self.left.pop(_thread(), None)
            return
        self.left[_thread()] = clusters
        if clusters and not torch.compiler.is_compiling():
            self.known[x.untyped_storage()] = clusters


@torch.compiler.assume_constant_result
def _thread() -> int:
    return get_ident()


class Merge(nn.Module):
    """Choose tokens to merge until `kept` remain of the `original` ones; other image sizes keep the same share.

    Those at the places `fixed`, from the end if negative, are never merged. Without `directions`, a block goes on with
    what an earlier one has merged. With 0 of them, tokens are merged by the cosine of their keys, as published. If all
    are zero, nothing reads these tokens later, as in front of a classifier of the class token: they are left out.
    Queries and keys are known only `inside` the block, where its entry sees the tokens.
    """

    def __init__(
        self,
        kept: int = 0,
        original: int = 0,
        fixed: tuple[int, ...] = (),
        directions: Tensor | None = None,
        inside: bool = False,
    ):
        super().__init__()
        self.kept, self.original, self.fixed, self.inside = kept, original, fixed, inside
        self.register_buffer("directions", directions)
        self.rule = None if directions is None else rule_for(directions)
        self.is_first = self.is_last = True
        self.state = MergeState()
        self.calls: dict[int, BlockCall] = {}  # by thread

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.rule = None if self.directions is None else rule_for(self.directions)

    def forward(self, x: Tensor, clusters: Clusters | None, call: "BlockCall") -> tuple[Tensor, Clusters | None]:
        """Merge tokens `[N, n, D]`; nothing is computed if none have to go."""
        num_all = x.shape[1] if clusters is None else clusters.places.shape[1]
        number, p = self.number(num_all), len(self.fixed)
        if self.directions is None or number >= x.shape[1]:
            return x, clusters
        last = tuple(range(x.shape[1] - p, x.shape[1]))
        fixed = tuple(sorted(place % num_all for place in self.fixed)) if clusters is None else last
        with torch.no_grad(), without_autocast(x.device):
            sizes = constant(torch.ones, 1, x.device).expand(x.shape[:2]) if clusters is None else clusters.sizes
            choice, per_weight = self._choice(x, sizes, number, fixed, call)
            starts = constant(torch.arange, x.shape[0], x.device)[:, None]
            places = choice.places.add(starts, alpha=number)
            if clusters is None:
                rows = choice.kept.add(starts, alpha=num_all)
            else:
                rows, places = clusters.rows.gather(1, choice.kept), places.flatten()[clusters.places]
        with without_autocast(x.device):
            x, sizes = choice.merged(x, per_weight)
        bias = None if choice.members is None else sizes.log()[:, None, None]
        return x, Clusters(sizes, bias, rows, places)

    def _choice(
        self, x: Tensor, sizes: Tensor, number: int, fixed: tuple[int, ...], call: "BlockCall"
    ) -> tuple[Choice, Tensor]:
        """Choose which tokens merge, and return how many originals weigh as much as one `[N, n]`."""
        if self.rule is in_order:
            return in_order(sizes, number, fixed), sizes  # which are not used
        if self.rule is as_published:
            if call.key is None:
                raise ValueError(
                    "the keys of this attention are not seen, since it does not call scaled_dot_product_attention or "
                    "is after the merging: take an estimator of both sides, such as facts"
                )
            return as_published(call.key.float().mean(dim=1), sizes, number, fixed), torch.ones_like(sizes)
        features = F.linear(x.float(), self.directions.float())  # bfloat16 changes one pair in seventy
        per_weight = call.originals_per_weight(sizes, fixed)
        return by_ward(features, sizes, per_weight, number, fixed), per_weight

    def number(self, num_all: int) -> int:
        """How many of the `num_all` tokens of an input remain."""
        here, free, all_free = (number - len(self.fixed) for number in (num_all, self.kept, self.original))
        return len(self.fixed) + max(1, (2 * here * free + all_free) // (2 * all_free)) if all_free else 0

    def num_operations(self, args: tuple[Any, ...], outputs: tuple[Any, ...]) -> int:
        """Operations of the product with the metric, if it merges any; to add up the merged tokens does not count."""
        return 2 * args[0].numel() * len(self.directions) if outputs[0] is not args[0] else 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"calls": {}}

    def extra_repr(self) -> str:
        return "" if self.directions is None else f"kept={self.kept}, original={self.original}, inside={self.inside}"


class BlockCall(TorchFunctionMode):
    """One call of a block with merged tokens `x`, which counts each key as often as its size.

    After the entry has merged what it has `seen`, additions to that (the residual connection) take the merged tokens.
    """

    def __init__(self, x: Tensor, clusters: Clusters | None):
        super().__init__()
        self.x, self.clusters, self.seen = x, clusters, None
        self.bias = None if clusters is None else clusters.bias
        self.key: Tensor | None = None
        self.scores: Callable[[], Tensor] | None = None  # of attention, `[N, heads, n, n]`
        self.is_merging = False  # what that computes is no attention of the block

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if self.is_merging:
            return func(*args, **kwargs)
        if func in ADDITIONS and self.seen is not None:
            args = tuple(self.x if each is self.seen else each for each in args)
        if func is F.scaled_dot_product_attention:
            query, key, value, *others = args
            if query.shape == key.shape:
                scale = kwargs.get("scale") or query.shape[-1] ** -0.5
                self.key, self.scores = key, lambda: _scores(query, key, scale)
            mask = others.pop(0) if others else kwargs.pop("attn_mask", None)
            if mask is not None and mask.shape[-1] not in (1, key.shape[-2]):
                raise ValueError(NO_MASKS)
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
            if self.bias is not None:
                bias = self.bias.to(query.dtype)
                mask = bias if mask is None else bias + mask
            return func(query, key, value, mask, *others, **kwargs)
        if func in SOFTMAX and args[0].ndim == 4 and args[0].shape[-1] == args[0].shape[-2] == self.x.shape[1]:
            scores, *others = args
            self.scores = lambda: scores
            if self.bias is not None:
                return func(scores + self.bias.to(scores.dtype), *others, **kwargs)
        return func(*args, **kwargs)

    def originals_per_weight(self, sizes: Tensor, fixed: tuple[int, ...]) -> Tensor:
        """How many originals weigh as much as one `[N, n]`: inverse powers of the attention that each receives.

        It is a mean over heads and queries, of all tokens and of the fixed ones. If it is not seen, all weigh one.
        """
        if self.scores is None:
            return torch.ones_like(sizes)
        attention = self.scores().float().softmax(dim=-1).mean(dim=1)
        received, tiny = attention.mean(dim=1), constant(torch.tensor, TINY, sizes.device)
        if not fixed:
            return (received + tiny) ** (-2 * ATTENTION)
        of_fixed = attention[:, fixed[0] : fixed[-1] + 1]
        if of_fixed.shape[1] > len(fixed):  # at both ends, or between
            of_fixed = attention.index_select(1, constant(torch.tensor, fixed, sizes.device))
        return torch.addcmul(tiny, received, of_fixed.mean(dim=1) if len(fixed) > 1 else of_fixed[:, 0]) ** -ATTENTION


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled scores of attention `[N, heads, n, n]`, in one product."""
    zero = constant(torch.zeros, 1, query.device).to(query.dtype)
    products = torch.baddbmm(zero, query.flatten(0, 1), key.flatten(0, 1).mT, beta=0, alpha=scale)
    return products.unflatten(0, query.shape[:2])


class TokenStream(LowRankLayer):
    """The tokens that are to be merged, as outputs of a layer, so that a data pass sees their gradients.

    Those at the places `free` of the `original` ones are captured. `moved` is by how much another forward function
    moves them.
    """

    bias = None
    rank = num_weights = 0

    def __init__(self, size: int, original: int, free: Sequence[int], inside: bool, like: Tensor):
        super().__init__()
        self.in_features = self.out_features = size
        self.original, self.free, self.inside = original, list(free), inside
        self.nothing = nn.Parameter(like.new_empty(0), requires_grad=False)  # has the device and type of a weight
        self.moved: Tensor | None = None

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.nothing.new_empty(self.out_features, 0), self.nothing.new_empty(0, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return x  # not a view: the gradient is that of all uses of these tokens

    def captured(self, x: Tensor) -> Tensor:
        """The free tokens of each of the sequences `[N, sequences * T, D]`."""
        return x.unflatten(1, (-1, self.original))[:, :, self.free].flatten(1, 2)


class PatchedModule(nn.Module):
    """Base of modules that first do something else than their own class does; `tokens` are their block's."""

    tokens: Any
    of_entry: type["PatchedModule"]
    """The behaviour of the module of a changed block that sees its tokens after attention."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, type(self).__bases__, self.__dict__


class MergingEntry(PatchedModule):
    """The first module after a block's attention, of merged tokens."""

    def forward(self, x: Tensor) -> Any:
        call = self.tokens.calls[_thread()]
        call.is_merging = True
        call.x, call.clusters = self.tokens(x, call.clusters, call)
        call.is_merging, call.seen = False, x
        return super().forward(call.x)


class MergedBlock(PatchedModule):
    """A block that merges tokens at its beginning or inside; its outputs give each original token its merged one's."""

    tokens: Merge
    of_entry = MergingEntry

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        merge = self.tokens
        if kwargs.get("output_attentions"):
            _warn_of_maps()
        clusters = None if merge.is_first else merge.state.of(x)
        call = BlockCall(x if clusters is None else clusters.of(x), clusters)
        if not merge.inside:
            call = BlockCall(*merge(call.x, clusters, call))
        merge.calls[_thread()] = call
        try:
            with call:
                outputs = super().forward(call.x, *args, **kwargs)
        finally:
            del merge.calls[_thread()]
        first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        first = first if call.clusters is None else call.clusters.restored(first)
        merge.state.leave(first, call.clusters, merge.is_last)
        return (first, *others) if isinstance(outputs, tuple) else first


@functools.cache
def _warn_of_maps() -> None:
    log.warning(
        "attention maps of blocks that merge tokens are of merged ones, [N, heads, n, n], with fewer in later blocks: "
        "compress with parts='units' to stack or compare them"
    )


class ObservedEntry(PatchedModule):
    """The first module after a block's attention; the block adds the difference if the stream moves its inputs."""

    def forward(self, x: Tensor) -> Any:
        streamed = self.tokens(x)
        if streamed is not x:
            self.tokens.moved = streamed - x
        return super().forward(streamed)


class ObservedBlock(PatchedModule):
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


def change_block(block: nn.Module, behaviour: type[PatchedModule], tokens: nn.Module, entry: str = "") -> None:
    """Let a block of any class, and its module `entry`, behave in another way too; the block's `tokens` say how."""
    _change(block, behaviour)
    block.tokens = tokens
    if entry:
        module = block.get_submodule(entry)
        _change(module, behaviour.of_entry)
        module.__dict__["tokens"] = tokens  # which stay a module of the block


def _change(module: nn.Module, behaviour: type[PatchedModule]) -> None:
    own = type(module).__bases__[1] if isinstance(module, PatchedModule) else type(module)
    module.__class__ = _combined(behaviour, own)  # type: ignore[arg-type]


@functools.cache
def _combined(behaviour: type[Any], own: type[Any]) -> type[Any]:
    """A class under the name of a module's own one, by which other libraries find blocks."""
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (behaviour, own), names)


def _new(behaviour: type[Any], own: type[Any]) -> Any:
    return object.__new__(_combined(behaviour, own))  # type: ignore[arg-type]
