"""Allocation: an integer program picks one choice per layer, with the least total error within a budget."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
import pulp
import scipy

CostValues = float | Sequence[float]
Status = Literal["optimal", "time limit"]

# Total errors are scaled to about this size: solvers treat differences below 1e-7 to 1e-5 as equal.
SCALE = 1e4
# Tolerance above a budget of 1, so that the solver's rounding excludes no choice that just fits; exact checks follow.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Allocation:
    """Each layer's choice by its index, the total of each cost, and the proof of optimality.

    No allocation within the budget has a total error below `bound`; `gap` is (error - bound) / |error|. `optimal` is
    proved to 1e-9 of the error; at the `time limit`, the choices are the best found and the bound is Lagrangian.
    """

    choices: dict[str, int]
    cost: tuple[float, ...]
    error: float
    bound: float
    gap: float
    status: Status


def allocate(
    profiles: Mapping[str, Sequence[tuple[CostValues, float]]], budget: CostValues, *, time_limit: float = 60.0
) -> Allocation:
    """Choose one `(cost, error)` per layer, minimising the total error within the budget for total cost (paper, eq. 3).

    A cost is a number, or one per bound of `budget`; `time_limit` is in seconds. Raises `ValueError` for a profile
    that is empty or holds NaN or infinity, and a budget below the smallest cost.
    """
    program = _Program(*_checked(profiles, budget))
    # CBC, by the class that PuLP 4 still has; of it and HiGHS, the faster on hard profiles. Its preprocessing misses
    # the optimum of some small problems; `_contenders` removes choices instead.
    command = partial(pulp.COIN_CMD, path=pulp.PULP_CBC_CMD.pulp_cbc_path, options=["preprocess off"])
    deadline = time.monotonic() + time_limit
    prices, best = program.relaxation()
    status: Status = "time limit"
    excluded: list[list[int]] = []
    while (left := deadline - time.monotonic()) > 0:
        found, proved = program.solve(command(msg=False, timeLimit=left, gapRel=0), prices, best, excluded)
        if found is not None and not program.fits(found):  # over by less than the solver's tolerance
            excluded.append(found)
        elif found is not None and (best is None or program.error(found) < program.error(best)):
            best = found  # and solve again: fewer choices can beat it, and their errors lie closer together
        else:
            status = "optimal" if proved else "time limit"
            break
    if best is None:
        if status == "optimal":
            raise ValueError("each bound can be met, but not all of them together: raise one of them")
        raise TimeoutError(f"CBC found no allocation within {time_limit} s: allow it more, or set fewer bounds")
    error = program.error(best)
    bound = error if status == "optimal" else min(program.bound(prices), error)
    return Allocation(
        choices=dict(zip(profiles, best, strict=True)),
        cost=program.cost(best),
        error=error,
        bound=bound,
        gap=(error - bound) / abs(error) if error else 0.0,
        status=status,
    )


def _checked(
    profiles: Mapping[str, Sequence[tuple[CostValues, float]]], budget: CostValues
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    if not profiles:
        raise ValueError("there is no layer to allocate to: profiles are empty")
    if empty := [name for name, profile in profiles.items() if not len(profile)]:
        raise ValueError(f"layers without a choice: {', '.join(empty)}; give each at least its dense cost and error 0")
    bounds = np.atleast_1d(np.asarray(budget, dtype=np.float64))
    if np.isnan(bounds).any():
        raise ValueError("the budget is NaN")
    costs, errors = [], []
    for name, profile in profiles.items():
        cost = np.array([np.atleast_1d(cost) for cost, _ in profile], dtype=np.float64)
        error = np.array([error for _, error in profile], dtype=np.float64)
        if not (np.isfinite(cost).all() and np.isfinite(error).all()):
            raise ValueError(f"the profile of layer {name} holds NaN or infinity: {list(profile)}")
        if cost.shape[1] != len(bounds):
            raise ValueError(f"layer {name} has {cost.shape[1]} costs per choice, the budget has {len(bounds)} bounds")
        costs.append(cost)
        errors.append(error)
    return costs, errors, bounds


@dataclass(frozen=True)
class _Program:
    """Costs `[K, bounds]` and errors `[K]` of each layer's K choices, and the budget `[bounds]`."""

    costs: list[np.ndarray]
    errors: list[np.ndarray]
    budget: np.ndarray

    def cost(self, choices: Sequence[int]) -> tuple[float, ...]:
        chosen = [cost[choice] for cost, choice in zip(self.costs, choices, strict=True)]
        return tuple(math.fsum(column) for column in zip(*chosen, strict=True))

    def error(self, choices: Sequence[int]) -> float:
        return math.fsum(error[choice] for error, choice in zip(self.errors, choices, strict=True))

    def fits(self, choices: Sequence[int]) -> bool:
        return all(spent <= bound for spent, bound in zip(self.cost(choices), self.budget, strict=True))

    @cached_property
    def spare(self) -> np.ndarray:
        """Budget left above the smallest costs `[bounds]`. Raises `ValueError` if a bound is below the smallest."""
        smallest = [math.fsum(column) for column in zip(*(cost.min(axis=0) for cost in self.costs), strict=True)]
        if any(smallest > self.budget):
            raise ValueError(
                f"no allocation costs as little as the budget of {_listed(self.budget)}: "
                f"the smallest feasible one is {_listed(smallest)}"
            )
        return self.budget - smallest

    @cached_property
    def shares(self) -> list[np.ndarray]:
        """Costs above each layer's smallest, as shares of `spare`, so that a sum of 1 is just affordable."""
        unit = np.where(self.spare > 0, self.spare, 1.0)
        return [(cost - cost.min(axis=0)) / unit for cost in self.costs]

    @cached_property
    def affordable(self) -> np.ndarray:
        """The sum of shares that each bound allows: 1, or 0 if nothing is spare."""
        return np.where(self.spare > 0, 1.0, 0.0)

    def relaxation(self) -> tuple[np.ndarray, list[int] | None]:
        """Solve the linear relaxation; return each cost's price `[bounds]`, and the rounded choices if they fit."""
        layer = np.repeat(np.arange(len(self.costs)), [len(error) for error in self.errors])
        errors = np.concatenate([error - error.min() for error in self.errors])
        size = errors.max() or 1.0
        solution = scipy.optimize.linprog(
            errors / size,
            A_ub=np.concatenate(self.shares).T,
            b_ub=self.affordable,
            # One choice for each layer.
            A_eq=scipy.sparse.coo_array((np.ones(len(layer)), (layer, np.arange(len(layer))))),
            b_eq=np.ones(len(self.costs)),
            method="highs",
        )
        if solution.x is None:
            return np.zeros(len(self.budget)), None
        rounded = []
        for shares, weights in zip(self.shares, np.split(solution.x, np.flatnonzero(np.diff(layer)) + 1), strict=True):
            used = np.flatnonzero(weights > 1e-9)
            rounded.append(int(used[shares[used].sum(axis=1).argmin()]))
        prices = np.maximum(-solution.ineqlin.marginals, 0) * size
        return prices, rounded if self.fits(rounded) else None

    def _priced(self, prices: np.ndarray) -> list[np.ndarray]:
        """Errors plus the costs at their prices."""
        return [error + shares @ prices for shares, error in zip(self.shares, self.errors, strict=True)]

    def bound(self, prices: np.ndarray) -> float:
        """Lower bound on the error of every allocation within the budget, for any prices (Lagrange)."""
        return math.fsum(priced.min() for priced in self._priced(prices)) - float(self.affordable @ prices)

    def _contenders(self, prices: np.ndarray, best: list[int] | None) -> list[np.ndarray]:
        """Choices of each layer that an allocation better than `best` can use; these prices rule out all others."""
        payable = self._payable()
        if best is None:
            return [np.flatnonzero(mask) for mask in payable]
        priced = self._priced(prices)
        rounding = 1e-12 * (sum(np.abs(values).max() for values in priced) + float(self.affordable @ prices))
        slack = self.error(best) - self.bound(prices) + rounding
        good = [values - values.min() <= slack for values in priced]
        return [np.flatnonzero(masks[0] & masks[1]) for masks in zip(payable, good, strict=True)]

    def _payable(self) -> list[np.ndarray]:
        """Mark the choices that leave every other layer an affordable one; repeat until no choice is removed."""
        kept = [np.ones(len(shares), dtype=bool) for shares in self.shares]
        while all(mask.any() for mask in kept):
            least = np.array([shares[mask].min(axis=0) for shares, mask in zip(self.shares, kept, strict=True)])
            left = self.affordable + ROUNDING - (least.sum(axis=0) - least)
            fits = [(shares <= room).all(axis=1) for shares, room in zip(self.shares, left, strict=True)]
            fewer = [mask & fit for mask, fit in zip(kept, fits, strict=True)]
            if all(map(np.array_equal, fewer, kept)):
                break
            kept = fewer
        return kept

    def solve(
        self, command: pulp.LpSolver, prices: np.ndarray, best: list[int] | None, excluded: list[list[int]]
    ) -> tuple[list[int] | None, bool]:
        """Run the solver; return its choices, None if it found none, and whether that is proved optimal."""
        contenders = self._contenders(prices, best)
        if not all(map(len, contenders)):
            return None, True
        errors = [error - error[kept].min() for error, kept in zip(self.errors, contenders, strict=True)]
        size = math.fsum(error[kept].max() for error, kept in zip(errors, contenders, strict=True))
        scale = SCALE / size if size else 1.0
        problem = pulp.LpProblem("allocation", pulp.LpMinimize)
        picks = [
            {k: problem.add_variable(f"x_{i}_{k}", cat=pulp.LpBinary) for k in kept.tolist()}
            for i, kept in enumerate(contenders)
        ]
        problem += pulp.lpSum(
            float(error[k]) * scale * x for error, xs in zip(errors, picks, strict=True) for k, x in xs.items()
        )
        for bound, affordable in enumerate(self.affordable.tolist()):
            spent = (shares[k, bound] * x for shares, xs in zip(self.shares, picks, strict=True) for k, x in xs.items())
            problem += pulp.lpSum(spent) <= affordable + ROUNDING
        for xs in picks:
            problem += pulp.lpSum(xs.values()) == 1
        for choices in excluded:
            if all(choice in xs for xs, choice in zip(picks, choices, strict=True)):
                problem += pulp.lpSum(xs[choice] for xs, choice in zip(picks, choices, strict=True)) <= len(picks) - 1
        problem.solve(command)
        if problem.status == pulp.LpStatusInfeasible:
            return None, True
        if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return None, False
        choices = [max(xs, key=lambda k: xs[k].value() or 0.0) for xs in picks]
        return choices, problem.sol_status == pulp.LpSolutionOptimal


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.12g}" for value in values)
