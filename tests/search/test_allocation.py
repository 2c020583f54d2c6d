import math
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from facts.search import allocate
from tests.refusals import refused


def least_error(profiles, budget):
    """The least total error of one choice `(costs, error)` a layer within all bounds, or None where nothing fits."""
    costs, errors = np.zeros((1, len(budget))), np.zeros(1)
    for profile in profiles.values():
        costs = (costs[:, None] + np.array([cost for cost, _ in profile])).reshape(-1, len(budget))
        errors = np.add.outer(errors, [error for _, error in profile]).flatten()
    fitting = errors[(costs <= np.array(budget)).all(axis=1)]
    return fitting.min().item() if len(fitting) else None


@st.composite
def instances(draw, num_bounds):
    """Up to 5 layers of up to 6 choices; errors of any sign, from 1e-9 to 1e3; budgets that some allocation meets."""
    cost = st.tuples(*[st.integers(0, 10 ** draw(st.integers(1, 9)))] * num_bounds)
    error = st.builds(lambda sign, size: sign * 10**size, st.sampled_from([-1, 1]), st.floats(-9, 3)) | st.just(0.0)
    profiles = draw(st.lists(st.lists(st.tuples(cost, error), min_size=1, max_size=6), min_size=1, max_size=5))
    profiles = {str(layer): profile for layer, profile in enumerate(profiles)}
    chosen = [draw(st.sampled_from(profile))[0] for profile in profiles.values()]
    spare = draw(st.tuples(*[st.sampled_from([0, 0, 1, 10, 10**6])] * num_bounds))
    return profiles, tuple(map(sum, zip(*chosen, spare, strict=True)))


class TestAgainstExhaustiveSearch:
    @pytest.mark.parametrize("num_bounds", [1, 3])
    @given(data=st.data())
    def test_errors_of_any_size_and_sign(self, num_bounds, data):
        """The solver proves its choice to be the best to 1e-9 of the most by which two allocations' errors differ."""
        profiles, budget = data.draw(instances(num_bounds))
        allocation = allocate(profiles, budget)
        assert allocation.status == "optimal"
        assert all(cost <= bound for cost, bound in zip(allocation.cost, budget, strict=True))
        errors = [[error for _, error in profile] for profile in profiles.values()]
        spread = sum(max(each) - min(each) for each in errors)
        assert abs(allocation.error - least_error(profiles, budget)) <= 1e-9 * spread

    @pytest.mark.parametrize(
        ("profiles", "budget", "choices"),
        [
            (  # CBC's preprocessing takes (144, 132) for the best of these, with 23.7 instead of 17.8
                {
                    "a": [(48, 331.3475), (96, 81.62104), (144, 23.71803), (192, 14.2269), (240, 0.0)],
                    "b": [(44, 47.64122), (88, 3.569151), (132, 0.0)],
                },
                307,
                {"a": 3, "b": 1},
            ),
            (  # a presolve may overlook the allocation with the dear choice of `a`
                {
                    "a": [(1626862549, 0.0), (7520776, 2254.9)],
                    "b": [(9, 0.0), (43221602, 2e-5)],
                    "c": [(232, 0.0), (8676, -5e-5), (5546115, 0.0), (107, 44.46)],
                },
                1626862665,
                {"a": 0, "b": 0, "c": 3},
            ),
            (  # of four layers at 10⁹ or 10⁹ + 1 the budget lets one take the dearer choice: the one that gains most
                {str(layer): [(10**9, 1.0 + layer), (10**9 + 1, 0.5)] for layer in range(4)},
                4 * 10**9 + 1,
                {"0": 0, "1": 0, "2": 0, "3": 1},
            ),
            (  # errors that cancel leave nothing to measure rounding by
                {"a": [(273, 0.0), (398, -1e6)], "b": [(269, -999999.9483167778), (18, 1e6)]},
                416,
                {"a": 1, "b": 1},
            ),
            ({"a": [(1, 1.5), (3, 1.5)], "b": [(2, 1.5)]}, 4, {"a": 0, "b": 0}),  # all errors equal
        ],
    )
    def test_hard_cases(self, profiles, budget, choices):
        assert allocate(profiles, budget).choices == choices


def test_at_a_time_limit_the_best_so_far_comes_with_a_bound():
    """The relaxation alone takes more than a millisecond."""
    rng = random.Random(0)
    choices = [[((rng.randint(0, 10**6),), 0.5 + rng.random()) for _ in range(100)] for _ in range(200)]
    profiles = {str(layer): profile for layer, profile in enumerate(choices)}
    allocation = allocate(profiles, 3 * 10**6, time_limit=1e-3)
    assert allocation.status == "time limit" and allocation.cost[0] <= 3 * 10**6
    assert allocation.bound <= allocate(profiles, 3 * 10**6).error <= allocation.error
    assert allocation.gap == (allocation.error - allocation.bound) / allocation.error
    assert 0 < allocation.gap < 0.01
    # Two bounds that only allocations of exactly one cost meet together, which no rounding finds.
    opposed = {str(n): [((cost, 10**6 - cost), error) for (cost,), error in own] for n, own in enumerate(choices)}
    with pytest.raises(TimeoutError, match=r"CBC found no allocation within 0\.001 s: allow it more"):
        allocate(opposed, (10**8, 10**8), time_limit=1e-3)


def test_budgets_from_the_smallest_to_none():
    """The message names the smallest feasible budget, which then works; from the dense cost on nothing is lost."""
    sizes, shares = {1: 1e-3, 7: 1e3, 12: 1e-2, 30: 10.0, 41: 1e-1, 50: 1e2}, (0.9, 0.5, 0.05, 0.01, 0.0)
    profiles = {str(u): [((u * (k + 1),), size * share) for k, share in enumerate(shares)] for u, size in sizes.items()}
    least, dense = (sum(profile[place][0][0] for profile in profiles.values()) for place in (0, -1))
    with pytest.raises(ValueError, match=f"as little as the budget of {least - 1}: the smallest feasible") as error:
        allocate(profiles, least - 1)
    (named,) = re.findall(r"smallest feasible one is (\S+)$", str(error.value))
    assert set(allocate(profiles, float(named)).choices.values()) == {0}
    for budget in (dense, dense + 1, math.inf):
        allocation = allocate(profiles, budget)
        assert set(allocation.choices.values()) == {4} and (allocation.error, allocation.gap) == (0.0, 0.0)


test_bad_profiles_and_budgets = refused(
    ({}, 1, "profiles are empty"),
    ({"a": [(1, 0.0)], "b": [], "c": []}, 1, "layers without a choice: b, c"),
    ({"a": [(1, 0.0)], "b": [(1, math.nan)]}, 2, "the profile of layer b holds NaN or infinity"),
    ({"a": [((1, 1), 1.0)]}, (2, math.nan), "the budget is NaN"),
    ({"a": [((1, 1), 1.0)], "b": [(1, 1.0)]}, (2, 2), "layer b has 1 costs per choice, the budget has 2 bounds"),
    ({"a": [((2, 30), 1.0), ((4, 10), 0.0)]}, (5, 9), r"the budget of 5, 9: the smallest feasible one is 2, 10$"),
    ({"a": [((2, 30), 1.0), ((4, 10), 0.0)]}, (3, 20), "each bound can be met, but not all of them together"),
    by=allocate,
)
