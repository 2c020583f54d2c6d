"""FastLRD: greedily removes the components that lower cosine similarity least (Luo et al., ISCAS 2024; our reading)."""

from bisect import bisect_left
from collections import Counter

from facts.moments.statistics import at_least_tiny
from facts.search import AllocationProblem, Plan, Search, SearchResult
from facts.utils.options import options


@options
class FastLRDSearch(Search):
    """Starting from ranks that cost as much as dense, components are removed one by one until the budget is met.

    The next is the one whose removal lowers the cosine similarity of a layer's weight and its approximation least per
    unit of cost, in the estimator's metric; `pela` has the published metric. Each layer keeps at least one component.
    """

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        full = {name: problem.full_rank(name) for name in problem.layers}
        falls = []
        for name, rank in full.items():
            kept = problem.decompositions[name].energies.cumsum(dim=0)
            # Cosine similarity of the weight and its approximation at the ranks 0 .. k: the root of the energy kept.
            similarities = [0.0, *(kept / at_least_tiny(kept[-1])).sqrt().tolist()]
            cost = problem.share(name, rank) / rank
            falls += [((similarities[k] - similarities[k - 1]) / cost, -k, name) for k in range(2, rank + 1)]
        falls.sort()  # a layer's own falls rise from its last component to its first

        def plan(number: int) -> Plan:
            removed = Counter(name for _, _, name in falls[:number])
            return {name: rank - removed[name] for name, rank in full.items()}

        return SearchResult(plan(bisect_left(range(len(falls)), True, key=lambda number: problem.fits(plan(number)))))
