"""Units with rules of their own: A3 and MoDeGPT, and the statistics of attention that they and CORP need.

Legend: C [n, n] is the second moment of a unit's inputs, S the selection of the kept units.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.calibration.outputs import distance
from facts.decomposition.truncation import Decomposition
from facts.estimators.base import KroneckerFactors
from facts.estimators.whitening import lift_spectrum
from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import evaluating, hooked, run
from facts.moments import InputGram
from facts.parts.attention import HeadsUnit, OutputUnit, ScoreUnit, output_cores, score_cores
from facts.parts.base import Part
from facts.parts.hidden import HiddenUnit
from facts.search import AllocationProblem, Plan, Search, SearchResult
from facts.search.methods.uniform import Uniform
from facts.utils.batches import to_device
from facts.utils.options import Count, Positive, Share, options

Rule = Callable[[Part, Any, Tensor, Any], Decomposition]
"""From a unit, one of its linears, E[x xᵀ] `[n, n]` of its inputs and that of attention's keys or values."""


class UnitSearch(Search):
    """A search that decomposes units by a rule of its own; layers outside units keep their decompositions."""

    @abstractmethod
    def rules(self) -> dict[type[Part], Rule]:
        """How a linear is decomposed for each kind of unit."""

    def decompositions(self, problem: AllocationProblem) -> dict[str, Decomposition]:
        moments, made = problem.calibration.moments((InputGram(),)), dict(problem.decompositions)
        others, rules = key_and_value_grams(problem), self.rules()
        for unit in problem.calibration.units.values():
            for name in unit.linears:
                linear = problem.calibration.linears[name]
                gram = moments[name][InputGram()][0].double() / moments[name].num_tokens
                gram = gram[: linear.in_features, : linear.in_features]  # without the 1 appended for a bias
                made[name] = rules[type(unit)](unit, linear, gram, others.get(name))
        return made


@options
class A3Search(UnitSearch, Uniform):
    """A3 (Wong et al., ICML 2026): every unit keeps the same share, and other layers are truncated by the estimator.

    In each head, queries and keys minimise the error of all scores before the softmax, and values and outputs that of
    the head's outputs, by SVDs in the metric of uncentred second moments. Hidden units stay by the norm of what they
    add to the outputs, and nothing replaces the others.

    From the abstract and the paper's problems and theorems, without the rule that ranks hidden units: that is from
    memory, following the source that it names, Drineas, Kannan and Mahoney (2006). The published code, DeepWok/a3,
    could not be read. The paper's networks have no biases: here the queries' bias is a weight of the input 1, and the
    others stay.
    """

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        return SearchResult(dict(self.ranks(problem)), decompositions=self.decompositions(problem))

    def rules(self) -> dict[type[Part], Rule]:
        return {
            ScoreUnit: lambda unit, linear, gram, keys: unit.decompose(linear, KroneckerFactors(gram, keys), 0.0, 0.0),
            OutputUnit: lambda unit, linear, gram, _: unit.decompose(linear, KroneckerFactors(A=gram), 0.0, 0.0),
            HiddenUnit: lambda unit, linear, gram, _: by_outputs(linear.weight.detach(), gram),
        }


@options
class MoDeGPTSearch(UnitSearch):
    """MoDeGPT (Lin et al., ICLR 2025): blocks that change their inputs most keep the most.

    Block b loses the share φ softmax(-s_b / temperature) of all its units, at most `most_removed`. s_b is 1 minus the
    mean cosine of a token before and after the block; φ is the smallest that meets the budget. The paper tunes the
    temperature for each network: here, the one of `temperatures` is used whose network has the outputs nearest to the
    original's on the search's data. Features of queries and keys are kept by the product of their norms. Values and
    outputs are decomposed by SVD in the metric of the block's inputs. Hidden units stay by ridge leverage scores, the
    diagonal of C (C + λ I)⁻¹, with Nyström's weights W C S (Sᵀ C S)⁻¹; `ridge` is λ over the mean of C's diagonal.
    Layers outside units stay dense.
    """

    temperatures: tuple[Positive, ...] = (0.1, 0.3, 1.0, 10.0)
    ridge: Positive = 0.01
    most_removed: Share = 0.9
    num_steps: Count = 60  # of a bisection

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        influence, decompositions = block_influence(problem), self.decompositions(problem)
        plans = [self.plan(problem, influence, temperature) for temperature in self.temperatures]
        best = min(plans, key=lambda plan: error_of(problem, problem.calibration.apply(plan, decompositions)))
        return SearchResult(best, decompositions=decompositions)

    def plan(self, problem: AllocationProblem, influence: Mapping[str, float], temperature: float) -> Plan:
        """Make a temperature's plan, with the smallest φ that meets the budget."""
        units = problem.calibration.units
        logits = -torch.tensor([*influence.values()], dtype=torch.float64) / temperature
        shares = dict(zip(influence, (logits - logits.max()).exp().tolist(), strict=True))

        def removing(total: float) -> Plan:
            kept = {name: 1 - min(total * shares[block_of(unit)], self.most_removed) for name, unit in units.items()}
            ranks = {name: unit.rank_of_ratio(kept[name]) for name, unit in units.items()}
            return dict.fromkeys(problem.parts) | ranks

        low, high = 0.0, 1 / min(shares.values())  # at which each block loses the most
        for _ in range(self.num_steps):
            middle = (low + high) / 2
            low, high = (low, middle) if problem.fits(removing(middle)) else (middle, high)
        return removing(high)

    def rules(self) -> dict[type[Part], Rule]:
        return {
            ScoreUnit: lambda unit, linear, gram, keys: by_norms(linear, gram, keys),
            OutputUnit: lambda unit, linear, _, values: unit.decompose(linear, KroneckerFactors(A=values), 0.0, 0.0),
            HiddenUnit: lambda unit, linear, gram, _: by_leverage(linear.weight.detach(), gram, self.ridge),
        }


def by_outputs(weight: Tensor, gram: Tensor) -> Decomposition:
    """Order the inputs of `weight [m, n]` by the norms of x_j w_j, given their second moment `[n, n]`."""
    energies, order = (gram.diagonal() * weight.double().square().sum(dim=0)).sort(descending=True)
    return Decomposition(weight[:, order], torch.eye(len(order)).to(weight)[order], energies, order=order)


def block_of(unit: Part) -> str:
    """The name of the block that holds a unit's module."""
    return unit.owner.rpartition(".")[0]


def block_influence(problem: AllocationProblem) -> dict[str, float]:
    """For each block, 1 minus the mean cosine of a token before and after it, on the calibration data."""
    blocks = dict.fromkeys(map(block_of, problem.calibration.units.values()))
    cosines: dict[str, list[Tensor]] = defaultdict(list)

    def note(name: str, block: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        after = outputs if isinstance(outputs, Tensor) else outputs[0]
        cosines[name].append(F.cosine_similarity(inputs[0], after, dim=-1).mean(dim=-1).flatten().cpu())

    run_with_hooks(problem, {problem.model.get_submodule(name): partial(note, name) for name in blocks})
    return {name: 1 - torch.cat(cosines[name]).mean().item() for name in blocks}


def error_of(problem: AllocationProblem, network: nn.Module) -> float:
    """The mean error of a network's outputs on the search's data."""
    calibration = problem.calibration
    batches, precision = problem.sensitivity_batches(), calibration.execution.precision
    found = distance(problem.model, network, batches, calibration.output_error, precision)
    assert found
    return found.mean


def by_norms(layer: LowRankLayer, of_queries: Tensor, of_keys: Tensor) -> Decomposition:
    """Order features of queries and keys by the product of their norms, given the second moments `[d, d]`."""
    left, right = (factor.detach() for factor in layer.factors())
    queries = torch.einsum("ki,ij,kj->k", right.double(), of_queries, right.double())
    keys = torch.einsum("ik,ij,jk->k", left.double(), of_keys, left.double())
    energies, order = (queries * keys).sort(descending=True)
    return Decomposition(left[:, order], right[order], energies)


def by_leverage(weight: Tensor, gram: Tensor, ridge: float) -> Decomposition:
    """Order the inputs of `weight [m, n]` by ridge leverage scores, with least-squares weights for any number of them.

    With C = L D Lᵀ in this order, the leading r columns of W L and rows of L⁻¹ make Nyström's weights of r inputs.
    """
    gram = lift_spectrum(gram)
    added = ridge * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    scores, order = torch.linalg.solve(gram + added, gram).diagonal().sort(descending=True)
    root = torch.linalg.cholesky(gram[order][:, order])
    unit = root / root.diagonal()
    right = torch.zeros_like(gram)
    right[:, order] = torch.linalg.inv(unit)
    return Decomposition((weight.double()[:, order] @ unit).to(weight), right.to(weight), scores, order=order)


def key_and_value_grams(problem: AllocationProblem) -> dict[str, Tensor]:
    """Compute E[y yᵀ] `[d, d]` in float64 for each call of an attention unit: y are a token's keys or values.

    Raises `ValueError` if there is no such unit.
    """
    units = [unit for unit in problem.calibration.units.values() if isinstance(unit, HeadsUnit)]
    if not units:
        raise ValueError("this search narrows the units of attention: choose parts=units, or another search")
    projections = {unit.owner: unit.heads(problem.model) for unit in units}
    sizes = {owner: heads.queries.shape[-1] for owner, (_, heads) in projections.items()}
    sums = {owner: torch.zeros(size + 1, size, device=problem.device) for owner, size in sizes.items()}

    def add(owner: str, module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        x = inputs[0].flatten(0, -2).to(sums[owner])
        sums[owner][:-1].addmm_(x.T, x)
        sums[owner][-1] += len(x)

    run_with_hooks(problem, {module: partial(add, owner) for owner, (module, _) in projections.items()})
    grams: dict[str, Tensor] = {}
    for unit in units:
        heads, summed = projections[unit.owner][1], sums[unit.owner].double()
        bases = score_cores(heads)[0].keys if isinstance(unit, ScoreUnit) else output_cores(heads)[0].values
        gram = bases.double() @ (summed[:-1] / summed[-1]) @ bases.double().mT
        grams |= dict(zip(unit.linears, gram, strict=True))
    return grams


@torch.no_grad()
def run_with_hooks(problem: AllocationProblem, hooks: Mapping[nn.Module, Callable]) -> None:
    """Run the network on the calibration data with a hook after each module."""
    with hooked(hooks.items()), evaluating(problem.model):
        for inputs, _ in problem.training_batches():
            run(problem.model, to_device(inputs, problem.device))
