"""Linear layers: the choice of those to compress, the reasons why others are left alone, and their low-rank form."""

import fnmatch
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from facts.cost.probe import Probe
from facts.decomposition.truncation import Decomposition, decompose
from facts.estimators.base import KroneckerFactors
from facts.modules.forms import PLAIN, Form
from facts.modules.linear_calls import is_pointwise, replace_submodule, with_linear_layers
from facts.modules.lowrank import LowRankLayer, own_parameter, trained_like
from facts.modules.networks import evaluating, output_layers
from facts.parts.base import Part

EXCLUDED_NAMES = ("norm", "head", "patch_embed", "downsample", "classifier")
MIN_OUT_FEATURES = 10
MAKES_OUTPUTS = "it is the output layer"
PARAMETRIZED = "its weight is parametrized; remove_parametrizations of torch.nn.utils.parametrize makes it a plain one"
NEVER_USED = "it is not called for the first sample in evaluation mode; other code may read its weight"
NOT_PER_SAMPLE = "its inputs are not one sample after the other along the first axis, as of experts, or [T, N, d]"
NOT_REAL = "its weight is not of real numbers"
NOT_REACHED = "the loss does not depend on it"
NOT_NAMED = "not among the layers named"
POINTWISE = 'it is a 1x1 convolution: layers="all" takes it too'

LayerNames = Iterable[str] | str | None
"""Names of layers, and patterns such as `vision_tower.*` for those worth compressing among the layers they match;
`all` worth compressing, with 1x1 convolutions; or `linear` ones. None: linear, or all if none is."""


@dataclass(frozen=True)
class LayerPart(Part):
    """A linear layer `[d_out, d_in]`, stored in a `form` at a rank."""

    d_out: int = 0
    d_in: int = 0
    bias: bool = False
    form: Form = field(default=PLAIN, repr=False)  # which no cache depends on

    @classmethod
    def of(cls, name: str, layer: nn.Linear) -> Self:
        """The part that a layer with a name is by itself."""
        (d_out, d_in), has_bias = layer.weight.shape, layer.bias is not None
        return cls(name, name, (name,), (name,), d_out * d_in, d_out=d_out, d_in=d_in, bias=has_bias)

    @property
    def largest(self) -> int:
        return min(self.d_out, self.d_in)

    @property
    def full_rank(self) -> int:
        return self.form.full_rank(self.d_out, self.d_in)

    def rank_of_ratio(self, ratio: float) -> int:
        return self.form.rank_of_ratio(self.d_out, self.d_in, ratio)

    def num_weights(self, rank: int | None) -> int:
        return self.dense if rank is None else self.form.num_weights(self.d_out, self.d_in, rank)

    @property
    def alike(self) -> Any:
        return self.d_in, self.d_out, self.bias, self.rows

    def decompose(self, linear: nn.Module, factors: KroneckerFactors, row: float, col: float) -> Decomposition:
        assert isinstance(linear, nn.Linear)
        return decompose(linear.weight.detach(), factors, shrinkage_row=row, shrinkage_col=col)

    def put(self, model: nn.Module, rank: int, weights: Mapping[str, Decomposition] | None = None) -> None:
        dense = model.get_submodule(self.owner)
        assert isinstance(dense, nn.Linear)
        if weights is None:
            replace_submodule(model, self.owner, self.form.empty(dense, rank))
            return
        decomposition = weights[self.owner]
        layer = self.form.layer(dense, *decomposition.truncate(rank))
        bias = decomposition.bias(dense, rank)
        layer.bias = None if bias is None else own_parameter(bias)
        replace_submodule(model, self.owner, trained_like(layer, dense))

    def in_form(self, form: Form) -> Self:
        return replace(self, form=form)


@dataclass(frozen=True)
class Selection:
    """A network in which the layers to compress are linear, and the reasons why others are skipped.

    `rows` counts the vectors that each layer multiplies for one sample (1 if no input is known).
    """

    model: nn.Module
    layers: dict[str, nn.Linear]
    rows: dict[str, int]
    skipped: dict[str, str]

    def without(self, names: Collection[str], reason: str) -> Self:
        """The same selection without some layers. Raises `ValueError` if none is left."""
        layers = {name: layer for name, layer in self.layers.items() if name not in names}
        if not layers:
            raise ValueError(f"no layer is left to compress: {', '.join(names)}: {reason}")
        return replace(self, layers=layers, skipped=self.skipped | dict.fromkeys(names, reason))


def is_pattern(names: LayerNames) -> bool:
    """Whether only patterns, such as `vision_tower.*`, select layers."""
    given = [names] if isinstance(names, str) else names
    return isinstance(given, list | tuple) and bool(given) and all("*" in name for name in given)


def select_layers(
    model: nn.Module,
    names: LayerNames = None,
    *,
    excluded_names: Iterable[str] = EXCLUDED_NAMES,
    probe: Probe | None = None,
) -> Selection:
    """Select the layers with these names, or those worth compressing (paper, section 5.1).

    The `probe` says what runs and what makes the outputs. Raises `ValueError` for an unknown name, or if no layer is
    left.
    """
    if adapters := [name for name, each in model.named_modules() if type(each).__module__.startswith("peft.tuners.")]:
        raise ValueError(
            f"{type(model).__name__} has adapters of PEFT ({adapters[-1]}): merge them first, with "
            "model = model.merge_and_unload(), so that the weights are what the network computes with"
        )
    model = with_linear_layers(model)
    candidates = replaceable(model)
    pointwise = [name for name, layer in candidates.items() if is_pointwise(layer)]
    probe = probe or Probe.of(model)
    never = [name for name, count in probe.rows.items() if not count]
    unrelated = dict.fromkeys(probe.unrelated or (), NOT_PER_SAMPLE)
    reasons = dict.fromkeys(never, NEVER_USED) | unrelated
    reasons |= dict.fromkeys(probe.makers, MAKES_OUTPUTS) | reasons_to_skip(model, excluded_names)
    if names not in (None, "all", "linear"):
        (chosen, matching), shared = _named(names, list(candidates), model), reasons_shared(model)
        for name in sorted(chosen):
            if reason := shared.get(name) or unrelated.get(name) or reason_not_plain(candidates[name]):
                raise ValueError(
                    f"layer {name} cannot be compressed: {reason}. Leave it out, or give it a plain weight of its own"
                )
        taken = [name for name in candidates if name in chosen or name in matching - reasons.keys()]
        reasons = {name: reasons[name] if name in matching and name in reasons else NOT_NAMED for name in candidates}
    elif names == "all" or (names is None and candidates.keys() <= {*reasons, *pointwise}):
        taken = [name for name in candidates if name not in reasons]
    else:
        taken = [name for name in candidates if name not in reasons and name not in pointwise]
        reasons = dict.fromkeys(pointwise, POINTWISE) | reasons
    skipped = {name: reasons[name] for name in candidates if name not in taken}
    if not taken and any(isinstance(module, LowRankLayer) for module in model.modules()):
        name = type(model).__name__
        raise ValueError(f"the layers of this {name} are low-rank already: compress the original to a smaller budget")
    if not taken:
        why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise ValueError(
            f"{type(model).__name__} has no layer to compress: {why or 'none is linear, as after quantising'}. "
            "Name the layers"
        )
    model = with_linear_layers(model, [name for name in taken if name in pointwise])
    renamed = {name: f"{name}.linear" if name in pointwise else name for name in taken}
    layers: dict[str, Any] = {new: model.get_submodule(new) for new in renamed.values()}
    return Selection(model, layers, {new: probe.rows[name] for name, new in renamed.items()}, skipped)


def _named(names: Iterable[str], candidates: list[str], model: nn.Module) -> tuple[set[str], set[str]]:
    """Find the layers that are named, a convolution without its `.linear`, and those that a pattern matches."""
    if isinstance(names, str) and not is_pattern(names):
        raise ValueError(
            f'layers are "all", "linear", a pattern such as "encoder.*", or given as a list of names: [{names!r}]'
        )
    chosen: set[str] = set()
    matching: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        named = {name} & {*candidates} or {name.removesuffix(".linear")} & {*candidates}  # names may look like patterns
        found = named or fnmatch.filter(candidates, name)
        if not found:
            raise ValueError(
                f"no linear layer or 1x1 convolution is called {name}; {type(model).__name__} has "
                f"{', '.join(candidates)}"
            )
        (matching if "*" in name and not named else chosen).update(found)
    return chosen, matching


def replaceable(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """The linear layers, and the 1x1 convolutions, which can be compressed like them."""
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear) or is_pointwise(each)}


def reasons_to_skip(model: nn.Module, excluded_names: Iterable[str] = EXCLUDED_NAMES) -> dict[str, str]:
    """Reasons to leave linear layers and 1x1 convolutions alone unless they are named.

    They make the outputs, are small, have a name that contains an excluded one (default: those that the paper leaves
    out, section 5.1), share their weight, or compute more than a product with it.
    """
    heads, shared, listed = output_layers(model), reasons_shared(model), layers_in_lists(model)
    reasons = {}
    for name, layer in replaceable(model).items():
        excluded = [part for part in excluded_names if part in name.replace("multihead", "")]
        if layer in heads:
            reasons[name] = MAKES_OUTPUTS
        elif excluded:
            reasons[name] = f"its name holds `{excluded[0]}`"
        elif is_parametrized(layer):  # reading its weight may change its state
            reasons[name] = PARAMETRIZED
        elif len(layer.weight) < MIN_OUT_FEATURES:
            reasons[name] = f"it has fewer than {MIN_OUT_FEATURES} outputs"
        elif name in shared:
            reasons[name] = shared[name]
        elif layer in listed:
            reasons[name] = "it is also in a plain list or mapping, where it cannot be replaced"
        elif reason := reason_not_plain(layer):
            reasons[name] = reason
    return reasons


def layers_in_lists(model: nn.Module) -> set[nn.Module]:
    """Modules that other modules hold in lists and mappings of their own, which PyTorch does not know of."""
    own = vars(nn.Module()).keys()
    values = (value for module in model.modules() for name, value in vars(module).items() if name not in own)
    groups = (tree_leaves(value) for value in values if isinstance(value, list | tuple | dict))
    return {leaf for group in groups for leaf in group if isinstance(leaf, nn.Module)}


def reasons_shared(model: nn.Module) -> dict[str, str]:
    """Reasons for modules that share their weight: replacing one would remove no weight, and untie the modules."""
    users: dict[Tensor, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if not is_parametrized(module) and isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            users[weight].append(name)
    shared = [names for names in users.values() if len(names) > 1]
    return {name: f"it shares its weight with {names[name == names[0]]}" for names in shared for name in names}


def reason_not_plain(layer: nn.Linear | nn.Conv2d) -> str | None:
    """Say why replacing a layer would lose more than its weight, as far as a call with one vector shows, or None."""
    if is_parametrized(layer):
        return PARAMETRIZED
    if not layer.weight.is_floating_point():
        return NOT_REAL
    if not layer.weight.numel():
        return "its weight is empty"
    kind: type[nn.Module] = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d
    of_class = type(layer).forward is not kind.forward
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    if layer.weight.is_meta or not (of_class or "forward" in vars(layer) or hooked):
        return None
    inputs = torch.linspace(-1, 1, layer.weight.shape[1]).to(layer.weight)[None]
    if kind is nn.Conv2d:
        inputs = inputs[..., None, None]
    with torch.no_grad(), evaluating(layer):
        expected = kind.forward(layer, inputs)
        try:
            outputs = layer(inputs)
        except Exception:  # from hooks, which are anyone's code
            outputs = None
    if isinstance(outputs, Tensor) and torch.equal(outputs, expected):
        return None
    if of_class:
        return f"it is a {type(layer).__name__}, which has its own way of computing"
    return "a hook, or a `forward` of its own, changes what it computes"
