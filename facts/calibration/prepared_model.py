"""A network that is ready to be compressed, its data and its loss, in one object; and decompositions of its layers."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from facts.calibration.data import NO_DATA, Data
from facts.calibration.outputs import refuse_unreadable
from facts.cost.count import Cost, count_flops, count_params
from facts.cost.timing import DEFAULT_TIMING, LatencyTable, TimingPolicy
from facts.decomposition.truncation import Decomposition
from facts.estimators.base import Estimator, KroneckerFactors, WeightedInputEstimator, see_data
from facts.modules.forms import PLAIN, Form
from facts.modules.lowrank import LinearLayer
from facts.moments.collect import DEFAULT_POLICY, LayerMoments, MemoryPolicy, collect_moments
from facts.moments.losses import Loss, OutputError, kl_divergence, summed_cross_entropy
from facts.moments.statistics import InputSum, Moment, at_least_tiny
from facts.parts import Part, Plan, apply, put
from facts.parts.base import Problem, packed, unpacked
from facts.utils.batches import to_device
from facts.utils.cache import Cache, calibration_key, content_key, file_name, name_of, shared_code
from facts.utils.progress import stage, with_progress


@dataclass(frozen=True)
class Execution:
    """Settings of all data passes.

    `precision` is the autocast type (float32 or bfloat16), `memory` the policy for when device memory is short,
    `timing` the length of a latency measurement. `cache` is a folder for moments, decompositions and sensitivity
    profiles, which a second run reads; without `cache_errors`, not for profiles, so that a search can be timed.
    """

    precision: torch.dtype = torch.float32
    memory: MemoryPolicy = DEFAULT_POLICY
    timing: TimingPolicy = DEFAULT_TIMING
    cache: Path | str | None = None
    cache_errors: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.precision, torch.dtype) or not self.precision.is_floating_point:
            raise ValueError(f"precision must be a type such as torch.bfloat16, got {self.precision!r}")
        kinds: dict[str, Any] = {"memory": MemoryPolicy, "timing": TimingPolicy, "cache": Path | str | None}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ValueError(f"{name} of an execution must be {getattr(kind, '__name__', kind)}, got {value!r}")


DEFAULT_EXECUTION = Execution()


@dataclass(frozen=True)
class PreparedModel:
    """A network that is ready to be compressed, its data and its loss.

    A plan gives ranks to the `parts` of the `model`, of `kinds` named in `facts.parts.KINDS`, with low-rank layers in a
    `form`. `rewritten` computes the same and calls a linear layer for each of the parts' `linears`; it is the model
    itself unless parts are units. `skipped` gives the reason for leaving each other layer alone. `data` are batches of
    `(inputs, targets)` or None; `held_out` only serve to compare the result with the original. `first_inputs` are those
    of the first batch, or noise; `example` is one sample on the meta device, if the network runs there. `loss` and
    `output_error` are sums over samples. `flops` counts the dense network by the paper's rule (None if unknown). With
    `draws_labels`, no loss on given labels was chosen, and the default search draws them. `output_signature`
    holds the outputs for the first sample, in few digits: networks that differ in code alone do not share a cache.
    """

    model: nn.Module
    rewritten: nn.Module
    parts: dict[str, Part]
    kinds: str = "layers"
    form: Form = PLAIN
    data: Data | None = None
    held_out: Data = NO_DATA
    loss: Loss = summed_cross_entropy
    output_error: OutputError = kl_divergence
    execution: Execution = DEFAULT_EXECUTION
    skipped: dict[str, str] = field(default_factory=dict)
    flops: int | None = None
    first_inputs: Any = None
    example: Any = None
    draws_labels: bool = True
    output_signature: tuple[Tensor, ...] = ()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def linears(self) -> dict[str, LinearLayer]:
        """The linear layers of all parts, in `rewritten`."""
        return {name: self.rewritten.get_submodule(name) for name in self.part_of}  # type: ignore[misc]

    @cached_property
    def cache(self) -> Cache | None:
        """Subfolder for this code, network, data, loss and precision. Raises `ValueError` for a loss without a name."""
        if self.execution.cache is None:
            return None
        data = None if self.data is None else calibration_key(self.data)
        loss = name_of(self.loss, "loss")
        precisions = self.execution.precision, torch.get_float32_matmul_precision()
        network = repr(self.model), self.model, self.output_signature
        key = content_key(shared_code(), *network, list(self.linears), repr(self.parts), data, loss, precisions)
        return Cache(Path(self.execution.cache) / key)

    @property
    def cost(self) -> Cost:
        """Cost of the dense network for one sample."""
        return Cost(self.flops, count_params(self.model))

    def cost_after(self, compressed: nn.Module, plan: Plan) -> Cost:
        """Cost of a compressed network for one sample: that of the dense one minus what the plan saves."""
        params = count_params(compressed)
        if self.flops is None:
            return Cost(None, params)
        if self.example is not None:  # a plan does not count activations, nor products with weights in functions
            return Cost(count_flops(compressed, self.example, "paper"), params)
        return Cost(self.flops - self.saved_flops(plan), params)

    def saved_flops(self, plan: Plan) -> int:
        """FLOPs for one sample that a plan saves in its parts."""
        return sum(self.parts[name].flops(None, {}) - self.parts[name].flops(rank, plan) for name, rank in plan.items())

    @property
    def layers(self) -> dict[str, nn.Linear]:
        """The linear layers, if they are the parts. Raises `ValueError` for units and tokens."""
        if len(self.single_layers) < len(self.parts):
            raise ValueError(f'this works on single layers, not on parts="{self.kinds}": choose parts="layers"')
        return self.linears  # type: ignore[return-value]

    @cached_property
    def part_of(self) -> dict[str, Part]:
        """Map each linear to the part that it belongs to."""
        return {linear: part for part in self.parts.values() for linear in part.linears}

    @property
    def units(self) -> dict[str, Part]:
        """The parts that are units of a block: at a rank they are narrower, not of low rank."""
        return {name: part for name, part in self.parts.items() if part.is_unit}

    @property
    def single_layers(self) -> dict[str, Part]:
        """The parts that become layers of low rank."""
        return {name: part for name, part in self.parts.items() if not (part.is_unit or part.shortens)}

    @property
    def has_tokens(self) -> bool:
        return any(part.shortens for part in self.parts.values())

    @cached_property
    def append_one(self) -> frozenset[str]:
        """Linears whose biases absorb the mean of the truncation error: those of units."""
        linears = self.linears
        return frozenset(n for n, part in self.part_of.items() if part.is_unit and linears[n].bias is not None)

    def on(self, data: Iterable[Any]) -> "PreparedModel":
        return replace(self, data=Data.of(data, self.model))

    def data_of(self, data: Iterable[Any], purpose: str) -> Data:
        """Other data of this network. Raises `ValueError` for none, or what it cannot read."""
        found = Data.of(data, self.model, purpose)
        refuse_unreadable(self.model, found, self.execution.precision)
        return found

    def in_form(self, form: Form) -> "PreparedModel":
        """The same network with low-rank layers in another form."""
        return replace(self, form=form, parts={name: part.in_form(form) for name, part in self.parts.items()})

    def apply(self, plan: Plan, decompositions: Mapping[str, Decomposition]) -> nn.Module:
        """Copy the model with its parts at the ranks of a plan."""
        return apply(self.model, self.parts, plan, decompositions)

    def cached_in(self, folder: Path | None) -> "PreparedModel":
        """The same network with its cache in a folder; None for no cache."""
        return replace(self, execution=replace(self.execution, cache=folder))

    def moments(
        self, wanted: Iterable[Moment], only: Collection[str] | None = None, cached: bool = True
    ) -> dict[str, LayerMoments]:
        """Collect moments of all layers, or of those in `only`, in one pass; with `cached`, use the cache."""
        cache = self.cache if cached else None
        if cache and only is not None and len(only) < len(self.linears):  # each group of layers has its own folder
            cache = Cache(cache.folder / content_key(list(only)))
        return collect_moments(
            self.rewritten,
            self.linears,
            () if self.data is None else self.data,
            [*wanted, InputSum()] if self.append_one else wanted,
            loss=self.loss,
            precision=self.execution.precision,
            memory=self.execution.memory,
            cache=cache,
            only=only,
            append_one=self.append_one,
        )

    def resolve_defaults(self, estimator: Estimator) -> Estimator:
        """The estimator with its defaults for units, if there are any."""
        if self.units and isinstance(estimator, WeightedInputEstimator):
            return estimator.for_units()
        return estimator

    def collect(self, estimators: Iterable[Estimator]) -> None:
        """Cache the moments that estimators need, collected together; skip estimators with cached decompositions.

        One whose moments the cache does not keep is decomposed, since they are only in memory.
        """
        resolved = map(self.resolve_defaults, estimators)
        waiting = [each for each in resolved if not (self.cache and self.cache.has(file_name(each)))]
        wanted = dict.fromkeys(moment for estimator in waiting for moment in estimator.moments if moment.is_kept)
        passing = [each for each in waiting if not all(moment.is_kept for moment in each.moments)]
        if passing and self.cache:
            self._decompose(passing[0], along=wanted)
        elif wanted:
            for names in self.execution.memory.groups(self.linears):
                self.moments(wanted, names)

    def decompositions(self, estimator: Estimator) -> dict[str, Decomposition]:
        """Decompose every layer (moments, factors, SVD), one group of layers after another; or read the cache."""
        if estimator.moments and self.data is None:
            name = type(estimator).__name__
            raise ValueError(f"{name} needs calibration data: an iterable of (inputs, targets) batches")
        if (known := self._cached(estimator)) is not None:
            return known
        with self.cache.locked(file_name(estimator)) if self.cache else nullcontext():
            known = self._cached(estimator)  # by now another process may have them
            return self._decompose(estimator) if known is None else known

    @stage("decomposition")
    def _cached(self, estimator: Estimator) -> dict[str, Decomposition] | None:
        """Read decompositions to the devices of their layers; None if the cache has none."""
        tensors = self.cache.load(file_name(estimator)) if self.cache else None
        if tensors is None:
            return None
        by_name: dict[str, dict[str, Tensor]] = {name: {} for name in self.linears}
        for key, tensor in tensors.items():
            name, _, field = key.rpartition("/")
            device = next(self.linears[name].parameters()).device
            by_name[name][field] = tensor.to(device) if tensor.ndim else tensor
        return {name: unpacked(fields) for name, fields in by_name.items()}

    def _decompose(self, estimator: Estimator, along: Collection[Moment] = ()) -> dict[str, Decomposition]:
        """Decompose every layer; the moments `along` are collected in the same pass, for the cache."""
        decompositions: dict[str, Decomposition] = {}
        for names in self.execution.memory.groups(self.linears):
            last, moments = estimator, dict.fromkeys(names, LayerMoments({}))
            if estimator.moments:
                with stage("calibration"):
                    last, moments = see_data(estimator, lambda wanted: self.moments([*wanted, *along], names))  # noqa: B023
            layers = {name: self.linears[name] for name in names}
            append_one = self.append_one if estimator.moments else frozenset()
            with stage("decomposition"):
                decompositions |= decompose_layers(layers, self.part_of, last, moments, append_one)
        if self.cache:
            fields = ((name, packed(decomposition)) for name, decomposition in decompositions.items())
            tensors = {f"{name}/{field}": tensor for name, tensors in fields for field, tensor in tensors.items()}
            with stage("decomposition"):
                self.cache.save(file_name(estimator), tensors)
        return decompositions

    def latency_table(self, num_turns: int) -> LatencyTable:
        """Times of the parts on the first batch, measured on first use."""
        inputs = to_device(self.first_inputs, self.device)
        return LatencyTable(
            self.model,
            {name: part for name, part in self.parts.items() if not part.shortens},
            partial(put, parts=self.parts),
            inputs,
            self.execution.precision,
            num_turns,
            {name: part for name, part in self.parts.items() if part.shortens},
        )


Calibration = PreparedModel  # its name until 0.1


def decompose_layers(
    layers: Mapping[str, LinearLayer],
    parts: Mapping[str, Part],
    estimator: Estimator,
    moments: Mapping[str, LayerMoments],
    append_one: Collection[str] = (),
) -> dict[str, Decomposition]:
    """Decompose each layer in the way of its part; moments of layers in `append_one` are of `[x, 1]`.

    Raises `ValueError` with the name of a layer that cannot be decomposed.
    """
    found: dict[str, Decomposition] = {}
    for names in with_progress(list(_together(layers, parts)), "decomposition"):
        problems = {name: _problem(name, layers[name], estimator, moments[name], name in append_one) for name in names}
        found |= _decomposed(parts[names[0]], problems, type(estimator).__name__)
    return {name: found[name] for name in layers}


def _together(layers: Mapping[str, LinearLayer], parts: Mapping[str, Part]) -> Iterator[list[str]]:
    """Divide the layers into groups that are decomposed together."""
    alike: dict[Any, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        alike[type(parts[name]), layer.in_features, layer.out_features].append(name)
    for names in alike.values():
        size = parts[names[0]].num_together(layers[names[0]])
        yield from (names[start : start + size] for start in range(0, len(names), size))


def _decomposed(part: Part, problems: Mapping[str, Problem], method: str) -> dict[str, Decomposition]:
    try:
        return dict(zip(problems, part.decompose_together(list(problems.values())), strict=True))
    except (ValueError, torch.linalg.LinAlgError) as error:
        if len(problems) > 1:
            return {name: _decomposed(part, {name: each}, method)[name] for name, each in problems.items()}
        raise ValueError(f"layer {next(iter(problems))} cannot be decomposed by {method}: {error}") from error


def _problem(name: str, layer: LinearLayer, estimator: Estimator, moments: LayerMoments, has_one: bool) -> Problem:
    row, col = estimator.shrinkage(moments)
    factors = estimator.factors(moments)
    d_out, d_in = layer.out_features, layer.in_features
    for side, factor, size in (("A", factors.A, d_in + has_one), ("B", factors.B, d_out)):
        if factor is not None and factor.shape != (size, size):
            made = f"{type(estimator).__name__} gives {side} {list(factor.shape)} for layer {name}"
            raise ValueError(f"{made}; it must be [{size}, {size}], or None for the identity")
    if has_one:
        factors = centred(factors, moments[InputSum()][0][:-1] / moments.num_tokens)
    for weight in layer.parameters():
        if weight.is_complex() or not (weight.is_meta or weight.isfinite().all()):
            method = type(estimator).__name__
            raise ValueError(f"layer {name} cannot be decomposed by {method}: its weight is complex, NaN or infinite")
    return layer, factors, row, col


def centred(factors: KroneckerFactors, mean: Tensor) -> KroneckerFactors:
    """Centre factors, leaving a layer's mean input to its bias; return them with that mean, in float64.

    The given factors are of inputs `[x, 1]`, A = [[S, a], [aᵀ, c]]. The best change of the bias for a ΔW is -ΔW a / c;
    the remaining cost has S - a aᵀ / c in place of A. A diagonal A is not centred: the `mean` of all inputs is used.
    """
    if factors.A is None:
        return replace(factors, mean=mean.double())
    whole = factors.A.double()
    inner, joint, one = whole[:-1, :-1], whole[:-1, -1], at_least_tiny(whole[-1, -1])
    if not joint.any():
        return replace(factors, A=inner, mean=mean.double())
    return replace(factors, A=inner - torch.outer(joint, joint) / one, mean=joint / one)
