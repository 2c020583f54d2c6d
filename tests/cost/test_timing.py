"""Timing of functions that take turns."""

import time
from dataclasses import replace
from functools import partial

import pytest

from facts.cost.timing import Timing, TimingPolicy


def test_median_spread_and_ratio_of_turns():
    """In the last turn of the ratio the machine slows down tenfold, and both with it."""
    timing = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert timing.median == 3
    assert timing.spread == pytest.approx((4 - 2) / 3)
    assert Timing((2.0, 2.0, 20.0)).ratio(Timing((1.0, 1.0, 10.0))) == 2
    assert Timing((1.0, 3.0, 4.0)).ratio(Timing((1.0, 1.0, 1.0))) == 3


def test_functions_take_turns():
    calls = []
    policy = TimingPolicy(num_turns=3, min_seconds=0)
    found = policy.times({name: partial(calls.append, name) for name in "ab"})
    assert {name: len(timing.seconds) for name, timing in found.items()} == {"a": 3, "b": 3}
    assert "".join(calls) == "abababab"  # once to warm up, then three times
    calls.clear()
    replace(policy, min_seconds=0.001).times({name: partial(calls.append, name) for name in "ab"})
    turns = [name for name, before in zip(calls, [None, *calls], strict=False) if name != before]
    assert "".join(turns) == "abababab" and len(calls) > 100
    (timing,) = TimingPolicy(num_turns=2, min_seconds=0).times({"sleep": partial(time.sleep, 0.02)}).values()
    assert min(timing.seconds) >= 0.02
