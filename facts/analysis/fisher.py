"""Parts of the Fisher that estimators keep and drop: its cosine to a Kronecker product, and cross-token terms.

Legend: n = d_in, m = d_out, K probes, D = Σ_t g_t x_tᵀ `[m, n]` the weight gradient of a sample. The empirical Fisher
itself, `[m n, m n]`, is never formed.
Source of the cosine: the paper's supplement on the comparison of estimators.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from facts.analysis.base import Analysis, AnalysisInputs, Findings
from facts.estimators import Estimator, KroneckerFactors
from facts.estimators.base import see_data
from facts.moments import GradWeightedInputGram, InputWeightedGradGram, Moment, SampleGradGrams
from facts.utils.cache import content_key
from facts.utils.options import options

MAX_VALUES = 2**29  # held at once by each kind of products: 2 GiB in float32, and as much for the probes


@options
class FisherSimilarity(Analysis):
    """Operator cosine similarity from `num_probes` Gaussian probes, the same for every estimator.

    Factors are not shrunk. Metrics: `cosine`, the mean over layers, with its standard error; values: both by layer.
    """

    num_probes: Annotated[int, Field(ge=2)] = 32
    seed: int = 0

    needs_factors: ClassVar[bool] = True

    def check(self, model: nn.Module, estimator: Estimator | None) -> None:
        if estimator is None:
            raise ValueError("Fisher similarity needs an estimator: choose one, or leave the analysis out")

    def run(self, inputs: AnalysisInputs) -> Findings:
        self.check(inputs.prepared.model, inputs.estimator)
        assert inputs.estimator is not None
        estimator, moments = see_data(inputs.estimator, inputs.prepared.moments)
        wanted = FisherProducts(self.num_probes, self.seed)
        terms = {}
        for group in groups_within(inputs.prepared.layers, MAX_VALUES // self.num_probes):
            for name, held_out in inputs.held_out.moments((wanted,), group).items():
                (products,) = held_out[wanted]
                d_out, d_in = products.shape[1:]
                probes = make_probes(self.num_probes, d_out, d_in, self.seed).to(products)
                try:
                    terms[name] = probe_terms(products, probes, estimator.factors(moments[name]))
                except ValueError as error:
                    raise ValueError(f"layer {name}: {error}; leave it out") from error
        return Findings(cosine(terms.values()), {name: cosine([layer]) for name, layer in terms.items()})


def groups_within(layers: Mapping[str, nn.Linear], max_weights: int) -> Iterator[list[str]]:
    """Divide the layers' names, in order, into groups of at most `max_weights` weights; a larger layer stands alone."""
    group: list[str] = []
    for name in layers:
        if group and sum(layers[each].weight.numel() for each in (*group, name)) > max_weights:
            yield group
            group = []
        group.append(name)
    yield group


def make_probes(num_probes: int, d_out: int, d_in: int, seed: int) -> Tensor:
    """Draw Gaussian probes `[K, m, n]` in float32, the same on every device and for layers of the same shape."""
    own_seed = int(content_key(seed, d_out, d_in), base=16) % 2**63
    return torch.randn(num_probes, d_out, d_in, generator=torch.Generator().manual_seed(own_seed))


@dataclass(frozen=True)
class ProbeMoment(Moment):
    """A sum of matrices `[K, m, n]`, one per probe."""

    num_probes: int
    seed: int = 0

    can_offload = False  # drawing the probes for every batch would take longer than the batch

    def shapes(self, d_in, d_out):
        return ((self.num_probes, d_out, d_in),)

    def init_state(self, layer, like, d_in, d_out):
        probes = make_probes(self.num_probes, d_out, d_in, self.seed).to(like)
        return torch.zeros_like(probes), probes

    def num_held(self, d_in, d_out):
        return 2 * self.num_probes * d_out * d_in

    def reducible(self, total, num_samples):
        return total[:1]

    def finalize(self, total):
        return total[:1]


@dataclass(frozen=True)
class FisherProducts(ProbeMoment):
    """Σ_k D_k ⟨D_k, V⟩: the Fisher times a probe."""

    def add(self, total, batch):
        products, probes = total
        grads = batch.sample_grads.flatten(1)
        products.view(len(probes), -1).addmm_((grads @ probes.flatten(1).T).T, grads)


@dataclass(frozen=True)
class TokenLocalProducts(ProbeMoment):
    """Σ_k Σ_t g_t (g_tᵀ V x_t) x_tᵀ: the token-local part of the Fisher times a probe."""

    def add(self, total, batch):
        x, g = batch.x.flatten(0, 1), batch.g.flatten(0, 1)
        for product, probe in zip(*total, strict=True):
            errors = ((g @ probe) * x).sum(dim=1, keepdim=True)
            product.addmm_((g * errors).T, x)


@dataclass(frozen=True, eq=False)
class ChangeEnergies(Moment):
    """Σ_k (Σ_t e_t)² and Σ_k Σ_t e_t² with e_t = g_tᵀ ΔW x_t, the first-order error at token t of a changed layer."""

    changes: Mapping[str, Tensor] = field(repr=False)

    __eq__, __hash__ = object.__eq__, object.__hash__  # each plan has its own change

    def shapes(self, d_in, d_out):
        return (), ()

    def init_state(self, layer, like, d_in, d_out):
        return like.new_zeros(2, dtype=torch.float64), self.changes[layer].to(like)

    def add(self, total, batch):
        energies, change = total
        errors = ((batch.g @ change) * batch.x).sum(dim=-1).double()
        energies += torch.stack([errors.sum(dim=1).square().sum(), errors.square().sum()])

    def finalize(self, total):
        return total[0].unbind()


@options
class CrossMoments(Analysis):
    """Ratio of the dropped cross-token part to the kept token-local one, on held-out samples; 0 if nothing is lost.

    Values are by layer; metrics are their means over layers. `operator`: ‖F - F_local‖_F / ‖F_local‖_F of the Fisher
    itself, from `num_probes` probes, with its standard error `operator_error`. `input_side`, `grad_side`: the same
    ratio for E[DᵀD] and E[DDᵀ], whose cross-token part vanishes by the assumption (paper, 4.1). `loss`: E[Σ_{t≠s} e_t
    e_s] / E[Σ_t e_t²] along the change ΔW of compression, at least -1; absent for a layer left dense.
    """

    num_probes: Annotated[int, Field(ge=2)] = 32
    seed: int = 0

    def run(self, inputs: AnalysisInputs) -> Findings:
        fisher, local = FisherProducts(self.num_probes, self.seed), TokenLocalProducts(self.num_probes, self.seed)
        sides = (SampleGradGrams(), GradWeightedInputGram(), InputWeightedGradGram())
        compressed = inputs.prepared.model if inputs.compressed is None else inputs.compressed
        linears = inputs.prepared.layers
        pairs = {name: (layer.weight, compressed.get_submodule(name).weight) for name, layer in linears.items()}
        change = ChangeEnergies({name: (before - after).detach() for name, (before, after) in pairs.items()})
        layers = {}
        for group in groups_within(linears, MAX_VALUES // self.num_probes):
            # Not cached: the change belongs to one plan, and the products are large.
            found = inputs.held_out.moments((fisher, local, *sides, change), group, cached=False)
            for name, moments in found.items():
                (whole,), (kept,) = moments[fisher], moments[local]
                operator, operator_error = norm_ratio(whole - kept, kept)
                (whole_A, whole_B), (A,), (B,) = (moments[side] for side in sides)
                layers[name] = {
                    "operator": operator,
                    "operator_error": operator_error,
                    "input_side": _norm_ratio(whole_A - A, A),
                    "grad_side": _norm_ratio(whole_B - B, B),
                }
                whole_loss, kept_loss = moments[change]
                if kept_loss > 0:
                    layers[name]["loss"] = (whole_loss / kept_loss - 1).item()
        kinds = ("operator", "input_side", "grad_side", "loss")
        known = {kind: [ratios[kind] for ratios in layers.values() if kind in ratios] for kind in kinds}
        return Findings({f"cross_{kind}": fmean(ratios) for kind, ratios in known.items() if ratios}, layers)


def _norm_ratio(dropped: Tensor, kept: Tensor) -> float:
    """‖dropped‖_F / ‖kept‖_F; 0 if nothing is dropped, even if nothing is kept."""
    above, below = (torch.linalg.vector_norm(matrix, dtype=torch.float64).item() for matrix in (dropped, kept))
    return above / below if above else 0.0


def probe_terms(products: Tensor, probes: Tensor, factors: KroneckerFactors) -> Tensor:
    """Compute ⟨F V, F̂ V⟩, ‖F V‖² and ‖F̂ V‖² of each probe V, with F̂ V = B V A: `[K, 3]` in float64.

    `products` `[K, m, n]` are F V, `probes` `[K, m, n]` are V. F V and the factors are divided by their norms, which
    leaves the cosine unchanged. Raises `ValueError` if one of them is zero.
    """
    approximate = probes
    if factors.B is not None:
        approximate = _unit(factors.B.to(probes)) @ approximate
    if factors.A is not None:
        approximate = approximate @ _unit(factors.A.to(probes))
    exact = _unit(products)
    pairs = ((exact, approximate), (exact, exact), (approximate, approximate))
    return torch.stack([(a * b).sum(dim=(1, 2), dtype=torch.float64) for a, b in pairs], dim=1).cpu()


def cosine(layers: Iterable[Tensor]) -> dict[str, float]:
    """The mean over layers of mean ⟨F V, F̂ V⟩ / √(mean ‖F V‖² · mean ‖F̂ V‖²), from each layer's terms `[K, 3]`.

    Its standard error, `cosine_error`, is that of the linearised ratio (delta method), for layers with the same probes.
    """
    values, influences = [], []
    for terms in layers:
        both, exact, approximate = terms.mean(dim=0)
        value = both / (exact * approximate).sqrt()
        values.append(value)
        influences.append(value * (terms @ torch.stack([1 / both, -0.5 / exact, -0.5 / approximate])))
    mean, error = _with_error(torch.stack(values).mean(), torch.stack(influences).mean(dim=0))
    return {"cosine": mean, "cosine_error": error}


def norm_ratio(first: Tensor, second: Tensor) -> tuple[float, float]:
    """√(mean ‖P V‖² / mean ‖Q V‖²) ≈ ‖P‖_F / ‖Q‖_F with its standard error, from products of P and Q, `[K, m, n]`."""
    squares = torch.stack([each.double().square().sum(dim=(1, 2)).cpu() for each in (first, second)], dim=1)
    above, below = squares.mean(dim=0)
    if above == 0:
        return 0.0, 0.0
    value = (above / below).sqrt()
    influence = value / 2 * (squares @ torch.stack([1 / above, -1 / below]))
    return _with_error(value, influence)


def _with_error(value: Tensor, influence: Tensor) -> tuple[float, float]:
    return value.item(), (influence.std() / len(influence) ** 0.5).item()


def _unit(matrix: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(matrix, dtype=torch.float64)  # float32 may not hold its square
    if norm == 0:
        raise ValueError("the cosine is not defined: a layer's gradients, or an estimator's factor, are all zero")
    return matrix / norm.to(matrix.dtype)
