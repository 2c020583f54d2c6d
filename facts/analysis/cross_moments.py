"""Cross-token terms of the Fisher, which the zero-cross-moment assumption drops, compared with the token-local ones.

Legend: n = d_in, m = d_out, D = Σ_t g_t x_tᵀ `[m, n]` the weight gradient of a sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from facts.analysis.base import Analysis, Findings, Subject, groups_within
from facts.analysis.similarity import norm_ratio
from facts.moments import (
    FisherProducts,
    GradWeightedInputGram,
    InputWeightedGradGram,
    Moment,
    SampleGradGrams,
    TokenLocalProducts,
)
from facts.utils.options import options

MAX_VALUES = 2**29  # held at once by each of two kinds of products: 2 GiB in float32, and as much for the probes


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

    def run(self, subject: Subject) -> Findings:
        fisher, local = FisherProducts(self.num_probes, self.seed), TokenLocalProducts(self.num_probes, self.seed)
        sides = (SampleGradGrams(), GradWeightedInputGram(), InputWeightedGradGram())
        change = ChangeEnergies(_changes(subject))
        layers = {}
        for group in groups_within(subject.layers, MAX_VALUES // self.num_probes):
            # Not cached: the change belongs to one plan, and the products are large.
            found = subject.held_out.moments((fisher, local, *sides, change), group, cached=False)
            for name, moments in found.items():
                (whole,), (kept,) = moments[fisher], moments[local]
                operator = norm_ratio(whole - kept, kept)
                (whole_A, whole_B), (A,), (B,) = (moments[side] for side in sides)
                layers[name] = {
                    "operator": operator.value,
                    "operator_error": operator.standard_error,
                    "input_side": _norm_ratio(whole_A - A, A),
                    "grad_side": _norm_ratio(whole_B - B, B),
                }
                whole_loss, kept_loss = moments[change]
                if kept_loss > 0:
                    layers[name]["loss"] = (whole_loss / kept_loss - 1).item()
        kinds = ("operator", "input_side", "grad_side", "loss")
        known = {kind: [ratios[kind] for ratios in layers.values() if kind in ratios] for kind in kinds}
        return Findings({f"cross_{kind}": fmean(ratios) for kind, ratios in known.items() if ratios}, layers)


def _changes(subject: Subject) -> dict[str, Tensor]:
    """ΔW of every layer; zero without a compressed network."""
    compressed = subject.model if subject.compressed is None else subject.compressed
    return {
        name: layer.weight.detach() - compressed.get_submodule(name).weight.detach()
        for name, layer in subject.layers.items()
    }


def _norm_ratio(dropped: Tensor, kept: Tensor) -> float:
    """‖dropped‖_F / ‖kept‖_F; 0 if nothing is dropped, even if nothing is kept."""
    above, below = (torch.linalg.vector_norm(matrix, dtype=torch.float64).item() for matrix in (dropped, kept))
    return above / below if above else 0.0
