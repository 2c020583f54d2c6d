"""One threshold on the errors of all layers."""

from bisect import bisect_left

from facts.decomposition.apply import Plan
from facts.search.base import Profile
from facts.search.problem import AllocationProblem


def plan_behind_cut(problem: AllocationProblem, errors: Profile) -> Plan:
    """Sort all pairs of a layer and a rank by falling error, and move a cut until the budget is met.

    A layer takes its smallest rank behind the cut, or stays dense if it has none. If even the smallest ranks cost too
    much, they are the plan.
    """
    entries = [(error, name, rank) for name in errors for rank, error in errors[name].items() if rank is not None]
    entries.sort(key=lambda entry: -entry[0])

    def plan(cut: int) -> Plan:
        ranks: Plan = dict.fromkeys(problem.layers)
        for _, name, rank in entries[cut:]:
            ranks[name] = min(rank, ranks[name] or rank)
        return ranks

    # The cost rises with the cut: the last one that fits, or 0 if none does.
    return plan(bisect_left(range(1, len(entries) + 1), True, key=lambda cut: not problem.fits(plan(cut))))
