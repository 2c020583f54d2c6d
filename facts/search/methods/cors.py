"""CoRS: measured sensitivities and an integer program (paper, section 4.3).

The KL divergence of the network's output is measured at five ratios per layer and interpolated; the program finds the
best ranks within the budget.
"""

from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import scipy
from numpy.typing import ArrayLike

from facts.parts import Part
from facts.parts.base import candidate_ranks
from facts.search.base import AllocationProblem, Ratios, SearchResult
from facts.search.sensitivity_measured import Sensitivity
from facts.search.token_program import MILPSearch
from facts.utils.options import Count, options

Interpolation = Literal["windows", "cubic", "linear", "none"]
METHODS = [method for method in get_args(Interpolation) if method != "none"]

DENSE = 1.0


@options
class CoRS(MILPSearch):
    """Measure each layer's error at several `ratios` and interpolate it to the multiples of `rank_multiple` in between.

    Parts with fewer multiples than ratios offer those of a half of it, a quarter, and so on. `points_between` instead
    sets the number of evenly spaced ranks between every two measured ones (paper, section 5.1: 20; its figure has the
    multiples of 8). `interpolation: none` offers only the measured ranks.
    """

    chooses_tokens = True

    rank_multiple: Count = 8
    ratios: Ratios = (0.1, 0.3, 0.5, 0.7, 0.9)
    points_between: Count | None = None
    interpolation: Interpolation = "windows"

    def least(self, part: Part) -> int:
        return part.least if part.shortens else part.rank_of_ratio(min(self.ratios))

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        ranks = problem.ranks_of_ratios(self.ratios)
        measured = errors = Sensitivity(problem).profile(ranks)
        if self.interpolation != "none":
            errors = {name: self._interpolated(ranks[name], measured[name]) for name in ranks}
        plan, solution = self.best_plan(problem, errors)
        return SearchResult(plan, solution, measured, predicted=solution.error, offered=errors)

    def _interpolated(self, ranks: list[int], errors: dict[int | None, float]) -> dict[int | None, float]:
        """Interpolate the measured errors to all ranks that are offered."""
        if self.points_between:
            points = [np.linspace(low, high, self.points_between + 2) for low, high in pairwise(ranks)]
            offered = sorted({*ranks, *np.rint(points).astype(int).ravel().tolist()})
        else:
            offered = candidate_ranks(ranks[0], ranks[-1], self.rank_multiple, at_least=len(self.ratios))
        # Over ranks; for plain layers this equals interpolation over ratios, since parabolas and distances scale alike.
        found = interpolate_profile(ranks, [errors[rank] for rank in ranks], offered, self.interpolation)
        return dict(zip(offered, found.tolist(), strict=True))


def interpolate_profile(
    ratios: ArrayLike, errors: ArrayLike, queries: ArrayLike, method: Interpolation = "windows"
) -> np.ndarray:
    """Interpolate errors at the queries; ratio 1 is the dense layer, whose error is 0.

    `windows` fits parabolas through every three neighbouring points; a query uses the parabola that is closer to the
    piecewise-linear curve, summed over the window's queries. `cubic` fits one spline with not-a-knot ends.

    `ratios` are distinct, in any order. Raises `ValueError` for duplicates, NaN, and queries outside the points.
    """
    x, y, at = (np.asarray(values, dtype=np.float64) for values in (ratios, errors, queries))
    if method not in METHODS:
        raise ValueError(f"interpolation must be one of {', '.join(METHODS)}, got {method!r}")
    if x.shape != y.shape or x.ndim != 1 or not len(x):
        raise ValueError(f"a profile needs as many errors as ratios, and at least one; got {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"the profile holds NaN or infinity: {dict(zip(x.tolist(), y.tolist(), strict=True))}")
    if len(np.unique(x)) < len(x):
        raise ValueError(f"every ratio may be given once, got {x.tolist()}")
    order = np.argsort(x)
    x, y = x[order], y[order]
    dense = (at == DENSE) & (x[-1] < DENSE)
    inside = at[~dense]
    if not ((x[0] <= inside) & (inside <= x[-1])).all():
        raise ValueError(f"queries must lie within {x[0]} .. {x[-1]} or be 1, got {inside.min()} .. {inside.max()}")
    values = np.zeros(len(at))
    if len(x) < 3 or method == "linear":
        values[~dense] = np.interp(inside, x, y)
    elif method == "cubic":
        values[~dense] = scipy.interpolate.CubicSpline(x, y)(inside)
    else:
        values[~dense] = _windows(x, y, inside)
    return values


def _windows(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    values, deviations = np.empty(len(at)), np.full(len(at), np.inf)
    for start in range(len(x) - 2):
        window = slice(start, start + 3)
        inside = (x[window][0] <= at) & (at <= x[window][-1])
        parabola = scipy.interpolate.BarycentricInterpolator(x[window], y[window], rng=0)(at[inside])
        deviation = np.abs(parabola - np.interp(at[inside], x, y)).sum()
        better = np.flatnonzero(inside)[deviation < deviations[inside]]
        values[better] = parabola[deviation < deviations[inside]]
        deviations[better] = deviation
    return values
