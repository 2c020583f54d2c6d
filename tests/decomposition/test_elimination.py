"""Elimination of inputs against least squares, exhaustive search and a plain loop."""

import pytest
import torch

from facts.decomposition import elimination
from facts.decomposition.elimination import eliminate, elimination_order
from facts.estimators import KroneckerFactors
from facts.estimators.whitening import shrink
from tests.decomposition.test_decomposition import random_factor
from tests.oracles.truncation import metric_error

ROW, COL = 0.3, 0.1


def least_squares(weight, A, kept):
    """The weight `[m, n]` that reads `kept` inputs alone and changes least in the metric of A."""
    found = torch.zeros_like(weight)
    found[:, kept] = torch.linalg.solve(A[kept][:, kept], A[kept] @ weight.T).T
    return found


def plain_order(A, B, weight):
    """The input that costs least is dropped, again and again, each choice among all by least squares."""
    kept, gone = list(range(weight.shape[1])), []
    while kept:
        rest = {j: [i for i in kept if i != j] for j in kept}
        costs = {j: metric_error(weight - least_squares(weight, A, rest[j]), A, B) for j in kept}
        gone.append(min(costs, key=costs.get))
        kept = rest[gone[-1]]
    return gone


def test_every_number_of_inputs_is_the_least_squares_fit_of_a_greedy_choice():
    weight = torch.randn(5, 9, dtype=torch.float64)
    A, B = random_factor(9), random_factor(5)
    decomposition = eliminate(weight, KroneckerFactors(A, B), shrinkage_row=ROW, shrinkage_col=COL)
    A, B = shrink(A, COL), shrink(B, ROW)
    assert decomposition.order.tolist() == plain_order(A, B, weight)[::-1]
    for rank in range(10):
        kept = decomposition.order[:rank]
        found = decomposition.left[:, :rank] @ decomposition.right[:rank]
        torch.testing.assert_close(found, least_squares(weight, A, kept), rtol=1e-9, atol=1e-10)
        lost = decomposition.energies[rank:].sum()
        torch.testing.assert_close(lost, metric_error(weight - found, A, B), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("side", ["A", "B"])
def test_an_identity_weighs_all_alike(side):
    weight, other = torch.randn(6, 6, dtype=torch.float64), {"A": random_factor(6), "B": random_factor(6)}
    identity = torch.eye(6, dtype=torch.float64)
    one, two = (eliminate(weight, KroneckerFactors(**(other | {side: each}))) for each in (None, identity))
    assert one.order.equal(two.order)
    torch.testing.assert_close(one.left @ one.right, weight)
    torch.testing.assert_close(one.energies, two.energies)


def test_steps_taken_together_are_those_taken_one_by_one(monkeypatch):
    """150 inputs, so that whole matrices are updated in between; ties are unlikely."""
    A, weight = random_factor(150), torch.randn(20, 150, dtype=torch.float64)
    together = elimination_order(A, weight)
    monkeypatch.setattr(elimination, "STEPS_AT_ONCE", 1)
    assert sorted(together) == list(range(150))
    assert together == elimination_order(A, weight)


def test_inputs_that_never_occur_leave_first_and_cost_nothing():
    weight, seen = torch.randn(4, 8, dtype=torch.float64), random_factor(8)
    idle = [2, 5]
    seen[idle] = seen[:, idle] = 0
    decomposition = eliminate(weight, KroneckerFactors(seen, random_factor(4)))
    assert decomposition.num_repaired == 1
    assert set(decomposition.order[-2:].tolist()) == set(idle)
    assert decomposition.energies[-2:].sum() < 1e-5 * decomposition.energies.sum()
