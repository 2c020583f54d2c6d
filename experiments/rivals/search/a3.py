"""A3: each part of a block minimises the error in what it computes, all at one share (Wong et al., ICML 2026).

From the abstract and the paper's problems and theorems, without the rule that ranks hidden units: that is from memory,
following the source that it names, Drineas, Kannan and Mahoney (2006). The published code, DeepWok/a3, could not be
read. The paper's networks have no biases: here the queries' bias is a weight of the input 1, and the others stay.
"""

import torch
from torch import Tensor

from experiments.rivals.attention import UnitSearch
from facts.decomposition.truncation import Decomposition
from facts.estimators.base import KroneckerFactors
from facts.modules.lowrank import LinearLayer
from facts.parts.attention import ScoreUnit
from facts.parts.base import Part
from facts.parts.hidden import HiddenUnit
from facts.search import AllocationProblem, SearchResult
from facts.search.methods.uniform import Uniform
from facts.utils.options import options


@options
class A3Search(UnitSearch, Uniform):
    """Every unit keeps the same share; layers outside units are truncated as by the estimator.

    In each head, queries and keys minimise the error of all scores before the softmax, and values and outputs that of
    the head's outputs, by SVDs in the metric of uncentred second moments. Hidden units stay by the norm of what they
    add to the outputs, and nothing replaces the others.
    """

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        return SearchResult(dict(self.ranks(problem)), decompositions=self.decompositions(problem))

    def decomposed(self, unit: Part, layer: LinearLayer, gram: Tensor, other: Tensor | None) -> Decomposition:
        if isinstance(unit, HiddenUnit):
            return by_outputs(layer.weight.detach(), gram)
        factors = KroneckerFactors(A=gram, B=other if isinstance(unit, ScoreUnit) else None)
        return unit.decompose(layer, factors, 0.0, 0.0)


def by_outputs(weight: Tensor, gram: Tensor) -> Decomposition:
    """Order the inputs of `weight [m, n]` by the norms of x_j w_j, given their second moment `[n, n]`."""
    energies, order = (gram.diagonal() * weight.double().square().sum(dim=0)).sort(descending=True)
    return Decomposition(weight[:, order], torch.eye(len(order)).to(weight)[order], energies, order=order)
