"""MPIFA's reconstruction: both factors by least squares, to a mixture of two outputs (Zhao et al., ICML 2025).

The target is W (λ x + (1 - λ) x̃): x are the inputs in the original, x̃ those behind compressed layers.
"""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from facts.decomposition.truncation import Decomposition
from facts.refit.base import Compressing, Refit
from facts.refit.flows import Flows, flows_of
from facts.refit.least_squares import best_left, best_right
from facts.utils.options import Share, options


@options
class MPIFA(Refit):
    """First U, then V of U V x̃, layer after layer; `original_share` is λ.

    `ridge` times ‖U V - W‖² is added for V, which keeps directions without data at the original weight.
    """

    by_block = False

    original_share: Share = 0.25
    ridge: Annotated[float, Field(ge=0)] = 1e-3

    def refitted(self, work: Compressing, names: list[str]) -> dict[str, Decomposition]:
        return {name: self._updated(work, name, flows) for name, flows in flows_of(work, names).items()}

    def _updated(self, work: Compressing, name: str, flows: Flows) -> Decomposition:
        weight, decomposition = work.weight(name), work.truncated(name)
        target = weight @ flows.own.lerp(flows.joint, self.original_share)
        left = best_left(target, flows.own, decomposition.right.to(target))
        right = best_right(target, flows.own, left, weight, self.ridge)
        kind = decomposition.left.dtype
        return replace(decomposition, left=left.to(kind), right=right.to(kind), mean=None)
