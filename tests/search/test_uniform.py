import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from facts.modules.forms import FORMS
from facts.search import Uniform
from tests.search.problems import plain_problem

PLAIN, PIVOTED = FORMS["plain"](), FORMS["pivoted"]()
sizes = st.integers(1, 5000)


@pytest.mark.parametrize(
    ("d_out", "d_in", "ratio", "expected"),
    [
        (768, 768, 0.5, 192),
        (2304, 768, 0.5, 288),
        (3072, 768, 0.6, 368),  # int(614 * 0.6)
        (1024, 4096, 0.4, 327),
        (10, 1, 0.4, 1),  # never less than one component
    ],
)
def test_rank_of_ratio(d_out, d_in, ratio, expected):
    assert PLAIN.rank_of_ratio(d_out, d_in, ratio) == expected


@given(d_out=sizes, d_in=sizes)
def test_full_rank_is_the_largest_that_costs_no_more_than_dense(d_out, d_in):
    rank = PLAIN.full_rank(d_out, d_in)
    assert rank * (d_out + d_in) <= d_out * d_in < (rank + 1) * (d_out + d_in)
    assert rank <= min(d_out, d_in)


@given(d_out=sizes, d_in=sizes, percent=st.integers(1, 100))
def test_pivoted_rank_is_the_largest_within_the_ratio(d_out, d_in, percent):
    def fits(rank):
        return 100 * PIVOTED.num_weights(d_out, d_in, rank) <= percent * d_out * d_in

    rank = PIVOTED.rank_of_ratio(d_out, d_in, percent / 100)
    assert fits(rank) or rank == 1
    assert rank == min(d_out, d_in) or not fits(rank + 1)
    assert PIVOTED.num_weights(d_out, d_in, PIVOTED.full_rank(d_out, d_in)) == d_out * d_in


@pytest.mark.parametrize("cost", ["flops", "params"])
def test_every_layer_keeps_the_same_fraction(cost):
    model = nn.ModuleDict({"a": nn.Linear(40, 120), "b": nn.Linear(64, 64)})
    problem = plain_problem(model, {}, {cost: 0.5}, rows={"a": 7, "b": 2})
    assert Uniform().allocate(problem).plan == {"a": 15, "b": 16}


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("step", [4, 16])
def test_rounded_ranks_spend_the_same_budget(ratio, step):
    model = nn.ModuleDict({f"{n}": nn.Linear(40 + 8 * n, 120) for n in range(8)} | {"narrow": nn.Linear(4, 6)})
    problem = plain_problem(model, {}, {"params": ratio})
    exact, rounded = (Uniform(rank_multiple=multiple).allocate(problem).plan for multiple in (1, step))
    assert problem.fits(rounded)
    assert all(rank % step == 0 for name, rank in rounded.items() if name != "narrow" and rank >= step)
    assert all(abs(rounded[name] - rank) < step for name, rank in exact.items())
    assert all(rank <= problem.full_rank(name) for name, rank in rounded.items())
    # What is left does not pay for one more step of any layer that was rounded down and would still be cheaper by it.
    for name, rank in rounded.items():
        if rank + step <= problem.full_rank(name):
            assert rank >= exact[name] or not problem.fits(rounded | {name: rank + step})
    assert rounded["narrow"] == exact["narrow"]
