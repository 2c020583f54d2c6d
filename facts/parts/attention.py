"""Attention's two products: the widths of its scores (queries and keys) and of its outputs (values and outputs).

Legend: H heads, d their width, D features of the inputs; q = W_q x, k = W_k x, v = W_v x, with no norm or rotation in
between; W_o reads the heads' outputs. The score product of a head is a linear map of [x; 1] with output gradient
Σ_j (∂L/∂s_ij) x_j, the output product one of the inputs that attention has mixed (docs/methods.md).
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from facts.cost.probe import Call
from facts.decomposition.truncation import Decomposition, decompose_products
from facts.modules.heads import GroupedProduct, LeadingOfHeads, OutputCores, PaddedHeads, ScoreCores, linear_of
from facts.modules.linear_calls import replace_submodule
from facts.modules.lowrank import LinearLayer, LowRankLayer, LowRankLinear, linear_like
from facts.moments.batch import LayerBatch
from facts.parts.base import NOT_CALLED, Found, Kind, Part, Problem, Unit, centred_inputs, computes_the_same, module_at

NO_PRODUCTS = "attention with more than products of its layers (a rotation, a norm, a hook) or with a fixed width"

LEAST_PIVOT = 1e-6  # of a Cholesky factor's diagonal: its square is far from float64's rounding
NEWTON_STEPS = 10  # enough for condition numbers of 1e6 and more

# Names of the projections and settings in timm, PyTorch (as `LinearAttention`), and transformers.
INPUTS = (("qkv",), ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
OUTPUT = ("proj", "out_proj", "o_proj")
NUM_HEADS = ("num_heads", "num_attention_heads")
SCALE = ("scale", "scaling")


@dataclass(frozen=True)
class Roles:
    """Names of an attention's projections: `inputs`, one or three for queries, keys and values, and `output`."""

    inputs: tuple[str, ...]
    output: str
    num_heads: int
    num_groups: int  # groups of heads that share keys and values

    @classmethod
    def of(cls, attention: nn.Module) -> Self | None:
        """Find the projections by name; None if a module names them differently or their sizes do not match."""
        kinds = nn.Linear, PaddedHeads, LeadingOfHeads
        children = {name: child for name, child in attention.named_children() if isinstance(child, kinds)}
        holders = attention, getattr(attention, "config", None)  # in language models only the configuration has it
        H = next((getattr(each, name) for each in holders for name in NUM_HEADS if hasattr(each, name)), None)
        inputs = next((names for names in INPUTS if children.keys() >= set(names)), None)
        output = next((name for name in OUTPUT if name in children), None)
        if inputs is None or output is None or not isinstance(H, int) or H < 1:
            return None
        modules, size = [children[name] for name in inputs], linear_of(children[output]).in_features
        if len({linear_of(module).in_features for module in modules}) > 1 or size % H:
            return None
        values, G = modules[-1], H
        if len(modules) == 3:
            G = values.num_heads if isinstance(values, PaddedHeads) else linear_of(values).out_features // (size // H)
        if not G or H % G:
            return None
        counts, each = [H, G, G], 3 // len(modules)
        parts = [part for module, heads in zip(modules, counts, strict=False) for part in _split(module, each, heads)]
        if not parts or [weight.shape[0] for weight, _ in parts] != counts:
            return None
        fits = parts[0][0].shape[1] == parts[1][0].shape[1] and parts[2][0].shape[1] * H == size
        return cls(inputs, output, H, G) if fits else None

    def layers(self, attention: nn.Module) -> list[str]:
        names = (*self.inputs, self.output)
        return [name if isinstance(attention.get_submodule(name), nn.Linear) else f"{name}.linear" for name in names]


@dataclass(frozen=True)
class Heads:
    """Weights of an attention: `queries`, `keys`, `values` `[H, d, D]`, `outputs [H, D, d]`, and their biases.

    Biases are `[H, d]`, the outputs' `[D]`. There may be fewer keys and values, each shared by a group of heads. Scores
    (queries and keys) and outputs (values and outputs) may differ in width. `scale` multiplies the scores.
    """

    roles: Roles
    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    output_bias: Tensor | None
    scale: float

    @classmethod
    def of(cls, attention: nn.Module) -> Self:
        """Read the weights of an attention with `Roles`, as views where possible."""
        roles = Roles.of(attention)
        assert roles
        H, each = roles.num_heads, 3 // len(roles.inputs)
        (queries, query_bias), (keys, key_bias), (values, value_bias) = (
            part
            for name in roles.inputs
            for part in _split(attention.get_submodule(name), each, H if name == roles.inputs[0] else roles.num_groups)
        )
        output, width = linear_of(attention.get_submodule(roles.output)), max(queries.shape[1], values.shape[1])
        return cls(
            roles=roles,
            queries=queries,
            keys=keys,
            values=values,
            outputs=output.weight.detach().unflatten(1, (H, -1)).transpose(0, 1),
            query_bias=query_bias,
            key_bias=key_bias,
            value_bias=value_bias,
            output_bias=None if output.bias is None else output.bias.detach(),
            scale=next((float(getattr(attention, name)) for name in SCALE if hasattr(attention, name)), width**-0.5),
        )

    @property
    def score_width(self) -> int:
        return self.queries.shape[1]

    @property
    def output_width(self) -> int:
        return self.values.shape[1]

    @property
    def width(self) -> int:
        """The width that queries, keys and values have in the attention's own code, zeros included."""
        return max(self.score_width, self.output_width)

    @property
    def has_output_bias(self) -> bool:
        """Whether narrower outputs have a bias: their own, or the one that W_o b_v adds up to."""
        return self.output_bias is not None or self.value_bias is not None

    @property
    def constant(self) -> Tensor | None:
        """Sum `[D]` that the biases of values and outputs add to the outputs: rows of attention sum to one."""
        if self.value_bias is None:
            return self.output_bias
        values = self.value_bias.repeat_interleave(len(self.outputs) // len(self.values), dim=0)
        added = torch.einsum("hdr,hr->d", self.outputs, values)
        return added if self.output_bias is None else added + self.output_bias


def polar(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factors `R [..., d, d]` and `Q [..., d, D]` with R Q = `rows`.

    The rows of Q are orthonormal, and as close as possible to the given ones. If d exceeds D, R and Q have rank D.
    By Cholesky-QR, twice, and Newton's iteration (Higham, 1986), which take all matrices at once on a GPU; by SVD if a
    matrix is close to singular.
    """
    exact = rows.double()
    first, failed = torch.linalg.cholesky_ex(exact @ exact.mT)
    sizes = first.diagonal(dim1=-2, dim2=-1)
    if not ((failed == 0) & (sizes.amin(dim=-1) > LEAST_PIVOT * sizes.amax(dim=-1))).all():
        u, s, vh = torch.linalg.svd(exact, full_matrices=False)
        return ((u * s[..., None, :]) @ u.mT).to(rows), (u @ vh).to(rows)
    basis = torch.linalg.solve_triangular(first, exact, upper=False)
    second, _ = torch.linalg.cholesky_ex(basis @ basis.mT)
    basis, square = torch.linalg.solve_triangular(second, basis, upper=False), first @ second
    rotation = square
    for _ in range(NEWTON_STEPS):
        inverse = torch.linalg.inv_ex(rotation).inverse.mT
        scale = (torch.linalg.matrix_norm(inverse) / torch.linalg.matrix_norm(rotation)).sqrt()[..., None, None]
        rotation = (rotation * scale + inverse / scale) / 2
    return (square @ rotation.mT).to(rows), (rotation @ basis).to(rows)


def score_cores(heads: Heads) -> tuple[Heads, list[LowRankLayer]]:
    """Make queries and keys orthonormal, and for each head the linear layer `[d, d]` between the two.

    With W_q = R_q Q_q and W_k = R_k Q_k, scores are (Q_k x_j)ᵀ R_kᵀ R_q (Q_q x_i). The queries' bias is the weight of a
    constant input 1. The keys' bias shifts all scores of a query equally, which the softmax ignores.
    """
    biases = () if heads.query_bias is None else (heads.query_bias[..., None],)
    (right, queries), (left, keys) = polar(torch.cat([heads.queries, *biases], dim=-1)), polar(heads.keys)
    bias, queries = (queries[..., -1], queries[..., :-1]) if biases else (None, queries)
    cores: list[LowRankLayer] = [LowRankLinear(key.T, query) for key, query in zip(left, right, strict=True)]
    return replace(heads, queries=queries, keys=keys, query_bias=bias, key_bias=None), cores


def output_cores(heads: Heads) -> tuple[Heads, list[LowRankLayer]]:
    """Make values and outputs orthonormal, and for each group of heads the linear layer `[d, d]` between the two.

    With W_v = R_v Q_v and W_o = Q_o R_o, this layer is R_o R_v; its inputs are Q_v x, mixed by attention. The h heads
    that share values also share a basis of outputs, and have one layer `[h d, d]` each. What the values' biases add to
    the outputs is added at the end.
    """
    groups = heads.outputs.unflatten(0, (len(heads.values), -1)).mT  # [G, h, d, D]
    (right, values), (left, outputs) = polar(heads.values), polar(groups.flatten(1, 2))
    lefts = left.mT.unflatten(-1, groups.shape[1:3]).transpose(1, 2)  # [G, h, h d, d]
    cores: list[LowRankLayer]
    if groups.shape[1] > 1:
        cores = [GroupedProduct(output, value) for output, value in zip(lefts, right, strict=True)]
    else:
        bias = left.new_zeros(left.shape[-1]) if heads.has_output_bias else None
        cores = [LowRankLinear(output, value, bias) for (output,), value in zip(lefts, right, strict=True)]
    outputs = outputs.unflatten(1, groups.shape[1:3]).flatten(0, 1).mT
    return replace(heads, values=values, outputs=outputs, value_bias=None, output_bias=heads.constant), cores


@dataclass(frozen=True)
class HeadsUnit(Unit):
    """A product within all heads of an attention."""

    def decompose_together(self, problems: Sequence[Problem]) -> list[Decomposition]:
        return decompose_products([(*linear.factors(), *rest) for linear, *rest in problems])

    def put(self, model: nn.Module, rank: int, weights: Mapping[str, Decomposition] | None = None) -> None:
        attention = model.get_submodule(self.owner)
        heads, chosen = Heads.of(attention), weights and [weights[linear] for linear in self.linears]
        put_heads(attention, self.narrowed(heads, chosen, rank) if chosen else self.emptied(heads, rank))

    def loads_without_facts(self) -> bool:
        return True

    @abstractmethod
    def narrowed(self, heads: Heads, decompositions: list[Decomposition], rank: int) -> Heads:
        """Narrow the heads to a rank."""

    @abstractmethod
    def emptied(self, heads: Heads, rank: int) -> Heads:
        """Narrow the heads to a rank, with zeros as weights."""


@dataclass(frozen=True)
class ScoreUnit(HeadsUnit):
    """The products of queries and keys in all heads of an attention, whose output products are also a unit."""

    def narrowed(self, heads: Heads, decompositions: list[Decomposition], rank: int) -> Heads:
        framed, _ = score_cores(heads)
        left, right = _stacked(decompositions, rank, heads.queries)
        bias = None if framed.query_bias is None else (right @ framed.query_bias[..., None]).squeeze(-1)
        return replace(framed, queries=right @ framed.queries, keys=left.mT @ framed.keys, query_bias=bias)

    def emptied(self, heads: Heads, rank: int) -> Heads:
        H, _, D = heads.queries.shape
        queries, keys = (heads.queries.new_zeros(H, rank, D) for _ in range(2))
        bias = None if heads.query_bias is None else heads.queries.new_zeros(H, rank)
        return replace(heads, queries=queries, keys=keys, query_bias=bias, key_bias=None)


@dataclass(frozen=True)
class OutputUnit(HeadsUnit):
    """The products of values and outputs in all heads; the output bias absorbs the mean of what is lost."""

    def narrowed(self, heads: Heads, decompositions: list[Decomposition], rank: int) -> Heads:
        framed, cores = output_cores(heads)
        left, right = _stacked(decompositions, rank, heads.values)
        bases = framed.outputs.unflatten(0, (len(right), -1)).transpose(1, 2).flatten(2)  # [G, D, h d]
        outputs = bases[:, None] @ left.unflatten(0, (len(right), -1))
        bias = framed.output_bias
        for basis, each, core in zip(bases, decompositions, cores, strict=True):
            added = each.bias(core, rank)
            if bias is not None and added is not None:
                bias = bias + basis @ added.to(basis)
        return replace(framed, values=right @ framed.values, outputs=outputs.flatten(0, 1), output_bias=bias)

    def emptied(self, heads: Heads, rank: int) -> Heads:
        H, D, _ = heads.outputs.shape
        values = heads.values.new_zeros(len(heads.values), rank, heads.values.shape[-1])
        bias = heads.outputs.new_zeros(D) if heads.has_output_bias else None
        outputs = heads.outputs.new_zeros(H, D, rank)
        return replace(heads, values=values, outputs=outputs, value_bias=None, output_bias=bias)

    def truncated(self, linear: LinearLayer, decomposition: Decomposition, rank: int) -> LowRankLayer:
        if decomposition.left.ndim == 2:
            return super().truncated(linear, decomposition, rank)
        return GroupedProduct(*(factor.to(next(linear.parameters())) for factor in decomposition.truncate(rank)))

    def slopes(self, batch: LayerBatch, decomposition: Decomposition) -> Tensor:
        if decomposition.left.ndim == 2:
            return super().slopes(batch, decomposition)
        x, left, right = centred_inputs(batch, decomposition)
        heads = batch.g.unflatten(1, (-1, len(left)))  # a token's heads are adjacent along T
        projected = torch.einsum("nthm,hmk->nthk", heads, left).flatten(1, 2)
        return (projected * (x @ right.T)).sum(dim=1)

    def rewrite(self, network: nn.Module, names: Collection[str]) -> None:
        call_cores(network.get_submodule(self.owner), f"{self.owner}.scores" in names)


FEATURES = {
    True: ("queries", "keys", "values", "query_bias", "key_bias", "value_bias"),
    False: ("values", "value_bias"),
}


class Attention(Kind):
    """Modules with projections of queries, keys and values; both products, or only that of the outputs, are units."""

    def layers_of(self, owner: str, module: nn.Module) -> list[str] | None:
        roles = Roles.of(module)
        return None if roles is None else [f"{owner}.{name}" for name in roles.layers(module)]

    def find(self, model: nn.Module, owner: str, call: Call | None) -> Found:
        attention, units = model.get_submodule(owner), _units(model, owner)
        roles, paths = Roles.of(attention), self.layers_of(owner, attention)
        assert roles and paths
        for with_scores in [True] * (len(units) == 2) + [False] * (len(roles.inputs) == 3):
            left_out, ignored, emptied = (
                partial(change, with_scores) for change in (_leave_out_half, _ignore_half, _empty_half)
            )
            if computes_the_same(attention, call, left_out, ignored):
                others = {} if with_scores else dict.fromkeys(paths[:2], NO_PRODUCTS)
                return Found(units[-1 - with_scores :], others, (left_out, emptied), owner)
        return Found(reasons=dict.fromkeys(paths, NO_PRODUCTS if call else NOT_CALLED))

    def at(self, model: nn.Module, name: str) -> Part | None:
        owner = name.rpartition(".")[0]
        return next((unit for unit in _units(model, owner) if unit.name == name), None)


def _units(model: nn.Module, owner: str) -> tuple[HeadsUnit, ...]:
    """The units of both products of all heads; only of the outputs' product if heads share keys."""
    attention = module_at(model, owner)
    roles = None if attention is None else Roles.of(attention)  # a module may have a length of 0
    if attention is None or roles is None:
        return ()
    heads, paths = Heads.of(attention), tuple(f"{owner}.{name}" for name in roles.layers(attention))
    first, last = (
        tuple(f"{owner}.{name}.heads.{group}" for group in range(roles.num_groups))
        for name in (roles.inputs[0], roles.output)
    )
    size, width = heads.values.numel() + heads.outputs.numel(), heads.output_width
    outputs = OutputUnit(f"{owner}.outputs", owner, paths[-2:], last, size, width=width)
    if roles.num_groups < roles.num_heads:
        return (outputs,)
    size, width = heads.queries.numel() + heads.keys.numel(), heads.score_width
    return ScoreUnit(f"{owner}.scores", owner, paths, first, size, width=width), outputs


def _leave_out_half(with_scores: bool, attention: nn.Module) -> None:
    """Keep every other feature, which fails in code that takes their number from its inputs."""
    heads = Heads.of(attention)
    kept = {name: each[:, ::2] for name in FEATURES[with_scores] if (each := getattr(heads, name)) is not None}
    put_heads(attention, replace(heads, **kept, outputs=heads.outputs[..., ::2]))


def _ignore_half(with_scores: bool, attention: nn.Module) -> None:
    """Put zeros in place of every other feature, and call the cores."""
    _empty_half(with_scores, attention)
    call_cores(attention, with_scores)


def _empty_half(with_scores: bool, attention: nn.Module) -> None:
    heads = Heads.of(attention)
    emptied = {name: each.clone() for name in FEATURES[with_scores] if (each := getattr(heads, name)) is not None}
    for each in emptied.values():
        each[:, 1::2] = 0
    put_heads(attention, replace(heads, **emptied))


def call_cores(attention: nn.Module, with_scores: bool) -> None:
    """Let an attention call the cores of both products, or only those of its outputs."""
    heads, scores = Heads.of(attention), None
    if with_scores:
        heads, scores = score_cores(heads)
    heads, outputs = output_cores(heads)
    put_heads(attention, heads)
    roles = heads.roles
    if scores:
        name = roles.inputs[0]
        attention.set_submodule(name, ScoreCores(attention.get_submodule(name), scores))
    projection = linear_of(attention.get_submodule(roles.output))
    attention.set_submodule(roles.output, OutputCores(projection, outputs, roles.num_heads))


def put_heads(attention: nn.Module, heads: Heads) -> None:
    """Replace an attention's heads: plain linear layers if scores and outputs are equally wide, otherwise padded."""
    roles, before = heads.roles, Heads.of(attention)
    *inputs, output = (linear_of(attention.get_submodule(name)) for name in (*roles.inputs, roles.output))
    is_kept = (heads.width, heads.scale) == (before.width, before.scale)  # a norm after the queries may cancel a factor
    scale = 1.0 if is_kept else heads.scale * heads.width**0.5
    queries = heads.queries * scale
    query_bias = None if heads.query_bias is None else heads.query_bias * scale
    parts = [(queries, query_bias), (heads.keys, heads.key_bias), (heads.values, heads.value_bias)]
    groups = [parts] if len(inputs) == 1 else [[each] for each in parts]
    for name, group, earlier in zip(roles.inputs, groups, inputs, strict=True):
        filled = [weight.new_zeros(weight.shape[:2]) if bias is None else bias for weight, bias in group]
        weight = torch.cat([weight.flatten(0, 1) for weight, _ in group])
        bias = None if earlier.bias is None else torch.cat([each.flatten() for each in filled])
        linear = linear_like(weight, bias, earlier)
        widths = tuple(weight.shape[1] for weight, _ in group)
        same = set(widths) == {heads.width}
        num_heads = len(group[0][0])
        replace_submodule(attention, name, linear if same else PaddedHeads(linear, widths, num_heads, heads.width))
    linear = linear_like(heads.outputs.transpose(0, 1).flatten(1), heads.output_bias, output)
    same = heads.output_width == heads.width
    replace_submodule(attention, roles.output, linear if same else LeadingOfHeads(linear, roles.num_heads))
    if not is_kept:
        sizes = {"head_dim": heads.width, "attn_dim": roles.num_heads * heads.width}
        for name, value in (sizes | dict.fromkeys(SCALE, heads.width**-0.5)).items():
            if hasattr(attention, name):
                setattr(attention, name, value)


def _split(module: nn.Module, number: int, num_heads: int) -> list[tuple[Tensor, Tensor | None]]:
    """Split a projection into `number` weights `[H, d, D]` and biases `[H, d]`; empty if sizes do not fit."""
    linear = linear_of(module)
    widths = module.widths if isinstance(module, PaddedHeads) else None
    if widths is None and linear.out_features % (number * num_heads):
        return []
    rows = [width * num_heads for width in widths or [linear.out_features // number // num_heads] * number]
    weights = linear.weight.detach().split(rows)
    biases = [None] * number if linear.bias is None else linear.bias.detach().split(rows)
    return [
        (weight.unflatten(0, (num_heads, -1)), None if bias is None else bias.unflatten(0, (num_heads, -1)))
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _stacked(decompositions: list[Decomposition], rank: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Stack the leading factors of all heads, `[H, m, rank]`, and of all groups, `[G, rank, d]`."""
    lefts, rights = zip(*(each.truncate(rank) for each in decompositions), strict=True)
    return torch.stack(lefts).flatten(0, -3).to(like), torch.stack(rights).to(like)
