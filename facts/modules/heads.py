"""Attention head by head: its weights, the linear layers within its two products, and narrower heads.

Legend: H heads, d their width, D features of the inputs; q = W_q x, k = W_k x, v = W_v x, with no norm or rotation in
between; W_o reads the heads' outputs.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.modules.lowrank import LowRankLayer, LowRankLinear, linear_layer, own_parameter

# Names of the projections and settings in timm, PyTorch (as `LinearAttention`), and transformers.
INPUTS = (("qkv",), ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
OUTPUT = ("proj", "out_proj", "o_proj")
NUM_HEADS = ("num_heads", "num_attention_heads")
SCALE = ("scale", "scaling")


class PaddedHeads(nn.Module):
    """Projection to heads of several `widths`, each zero-padded to one width, for code that needs equal widths."""

    def __init__(self, linear: nn.Linear, widths: tuple[int, ...], num_heads: int, padded: int):
        super().__init__()
        self.linear, self.widths, self.num_heads, self.padded = linear, widths, num_heads, padded

    def forward(self, x: Tensor) -> Tensor:
        parts = self.linear(x).split([width * self.num_heads for width in self.widths], dim=-1)
        heads = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        return torch.cat([F.pad(each, (0, self.padded - each.shape[-1])).flatten(-2) for each in heads], dim=-1)

    def extra_repr(self) -> str:
        return f"widths={self.widths}, padded={self.padded}"


class LeadingOfHeads(nn.Module):
    """A linear layer on the first columns of each head; the others are zero padding."""

    def __init__(self, linear: nn.Linear, num_heads: int):
        super().__init__()
        self.linear, self.num_heads = linear, num_heads

    def forward(self, x: Tensor) -> Tensor:
        width = self.linear.in_features // self.num_heads
        return self.linear(x.unflatten(-1, (self.num_heads, -1))[..., :width].flatten(-2))


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
    def of(cls, attention: nn.Module, roles: Roles) -> Self:
        """Read the weights, as views where possible."""
        H, each = roles.num_heads, 3 // len(roles.inputs)
        (queries, query_bias), (keys, key_bias), (values, value_bias) = (
            part
            for name in roles.inputs
            for part in _split(attention.get_submodule(name), each, H if name == roles.inputs[0] else roles.num_groups)
        )
        output, width = linear_of(attention.get_submodule(roles.output)), max(queries.shape[1], values.shape[1])
        return cls(
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

    def empty(self, scores: int | None, outputs: int | None) -> Self:
        """Change the widths, with zeros as weights; None leaves a width and its weights unchanged."""
        H, _, D = self.queries.shape
        heads = self
        if scores is not None:
            new = [self.queries.new_zeros(H, scores, D) for _ in range(2)]
            bias = None if self.query_bias is None else self.queries.new_zeros(H, scores)
            heads = replace(heads, queries=new[0], keys=new[1], query_bias=bias, key_bias=None)
        if outputs is not None:
            values, weights = (
                self.values.new_zeros(len(self.values), outputs, D),
                self.outputs.new_zeros(H, len(self.outputs[0]), outputs),
            )
            bias = None if not self.has_output_bias else self.outputs.new_zeros(len(self.outputs[0]))
            heads = replace(heads, values=values, outputs=weights, value_bias=None, output_bias=bias)
        return heads

    @property
    def has_output_bias(self) -> bool:
        """Whether narrower outputs have a bias: their own, or the one that W_o b_v adds up to."""
        return self.output_bias is not None or self.value_bias is not None

    @property
    def constant(self) -> Tensor | None:
        """What the biases of values and outputs add to the outputs, `[D]`: rows of attention sum to one."""
        if self.value_bias is None:
            return self.output_bias
        values = self.value_bias.repeat_interleave(len(self.outputs) // len(self.values), dim=0)
        added = torch.einsum("hdr,hr->d", self.outputs, values)
        return added if self.output_bias is None else added + self.output_bias


def polar(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factors `R [..., d, d]` and `Q [..., d, D]` with R Q = `rows`.

    The rows of Q are orthonormal, and as close as possible to the given ones. If d exceeds D, R and Q have rank D.
    """
    u, s, vh = torch.linalg.svd(rows.double(), full_matrices=False)
    return ((u * s[..., None, :]) @ u.mT).to(rows), (u @ vh).to(rows)


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


class GroupedProduct(LowRankLayer):
    """Products `left_h @ right` for heads that share values: `[..., h, n]` to `[..., h, m]`."""

    bias = None

    def __init__(self, left: Tensor, right: Tensor):
        super().__init__()
        self.left, self.right = own_parameter(left), own_parameter(right)
        _, self.out_features, self.rank = left.shape
        self.in_features = right.shape[1]

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.left, self.right

    @property
    def num_weights(self) -> int:
        return self.left.numel() + self.right.numel()

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...hr,hmr->...hm", F.linear(x, self.right), self.left)


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


class ScoreCores(nn.Module):
    """A projection whose outputs begin with the queries, followed by each head's core."""

    def __init__(self, projection: nn.Module, cores: list[LowRankLayer]):
        super().__init__()
        self.projection, self.heads = projection, nn.ModuleList(cores)
        self.padded = projection.padded if isinstance(projection, PaddedHeads) else cores[0].in_features

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projection(x)
        size = self.padded * len(self.heads)
        queries = projected[..., :size].unflatten(-1, (len(self.heads), -1)).unbind(-2)
        scored = [core(query[..., : core.in_features]) for core, query in zip(self.heads, queries, strict=True)]
        scored = [F.pad(each, (0, self.padded - each.shape[-1])) for each in scored]
        return torch.cat([*scored, projected[..., size:]], dim=-1)


class OutputCores(nn.Module):
    """Each group's core, followed by the output projection."""

    def __init__(self, projection: nn.Linear, cores: list[LowRankLayer], num_heads: int):
        super().__init__()
        self.projection, self.heads, self.num_heads = projection, nn.ModuleList(cores), num_heads

    def forward(self, mixed: Tensor) -> Tensor:
        groups = mixed.unflatten(-1, (len(self.heads), self.num_heads // len(self.heads), -1)).unbind(-3)
        outputs = [core(group[..., : core.in_features]) for core, group in zip(self.heads, groups, strict=True)]
        return self.projection(torch.cat([each.sum(dim=-2) for each in outputs], dim=-1))


def call_cores(attention: nn.Module, roles: Roles, kind: str) -> None:
    """Make an attention call the cores of both `products`, or only those of `outputs`."""
    heads, scores = Heads.of(attention, roles), None
    if kind == "products":
        heads, scores = score_cores(heads)
    heads, outputs = output_cores(heads)
    put_heads(attention, roles, heads)
    if scores:
        name = roles.inputs[0]
        attention.set_submodule(name, ScoreCores(attention.get_submodule(name), scores))
    projection = linear_of(attention.get_submodule(roles.output))
    attention.set_submodule(roles.output, OutputCores(projection, outputs, roles.num_heads))


def put_heads(attention: nn.Module, roles: Roles, heads: Heads) -> None:
    """Replace an attention's heads: plain linear layers if scores and outputs are equally wide, otherwise padded."""
    trainable = linear_of(attention.get_submodule(roles.output)).weight.requires_grad
    biases = [linear_of(attention.get_submodule(name)).bias is not None for name in roles.inputs]
    before = Heads.of(attention, roles)
    is_kept = (heads.width, heads.scale) == (before.width, before.scale)  # a norm after the queries may cancel a factor
    scale = 1.0 if is_kept else heads.scale * heads.width**0.5
    queries = heads.queries * scale
    query_bias = None if heads.query_bias is None else heads.query_bias * scale
    parts = [(queries, query_bias), (heads.keys, heads.key_bias), (heads.values, heads.value_bias)]
    for name, group, biased in zip(
        roles.inputs, [parts] if len(biases) == 1 else [[each] for each in parts], biases, strict=True
    ):
        filled = [weight.new_zeros(weight.shape[:2]) if bias is None else bias for weight, bias in group]
        weight = torch.cat([weight.flatten(0, 1) for weight, _ in group])
        linear = _linear(weight, torch.cat([bias.flatten() for bias in filled]) if biased else None, trainable)
        widths = tuple(weight.shape[1] for weight, _ in group)
        same = set(widths) == {heads.width}
        num_heads = len(group[0][0])
        attention.set_submodule(name, linear if same else PaddedHeads(linear, widths, num_heads, heads.width))
    linear = _linear(heads.outputs.transpose(0, 1).flatten(1), heads.output_bias, trainable)
    same = heads.output_width == heads.width
    attention.set_submodule(roles.output, linear if same else LeadingOfHeads(linear, roles.num_heads))
    if not is_kept:
        set_width(attention, roles, heads.width)


def set_width(attention: nn.Module, roles: Roles, width: int) -> None:
    """Set the head width in an attention's attributes, and the scale of its scores to match."""
    for name, value in (("head_dim", width), ("attn_dim", roles.num_heads * width)):
        if hasattr(attention, name):
            setattr(attention, name, value)
    for name in SCALE:
        if hasattr(attention, name):
            setattr(attention, name, width**-0.5)


def linear_of(module: nn.Module) -> nn.Linear:
    """Get the linear layer of a projection, which may be padded."""
    linear = module if isinstance(module, nn.Linear) else module.linear
    assert isinstance(linear, nn.Linear)
    return linear


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


def _linear(weight: Tensor, bias: Tensor | None, trainable: bool) -> nn.Linear:
    layer = linear_layer(own_parameter(weight), None if bias is None else own_parameter(bias))
    return layer.requires_grad_(trainable)
