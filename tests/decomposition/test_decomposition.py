"""Decompositions, of products too, and eliminations of inputs against dense oracles."""

from dataclasses import replace

import pytest
import torch

import facts
from facts.calibration.prepared_model import centred
from facts.decomposition import elimination
from facts.decomposition.elimination import eliminate, elimination_orders
from facts.decomposition.truncation import by_gram, decompose, decompose_products
from facts.estimators import ESTIMATORS, GFWSVD, KroneckerFactors
from facts.estimators.whitening import shrink
from facts.parts.attention import Heads, output_cores, polar, score_cores
from facts.utils.numerics import solved
from tests.devices.pretended import pretended_cuda
from tests.networks import relative_error
from tests.oracles.fisher import discarded_energies, metric_error

# Roots and their inverses in float64 lose what the factor's condition number (1e4 here at most) takes from 1e-16.
EXACT = 1e-9
ROW, COL = 0.3, 0.1


def random_factor(size):
    vectors = torch.randn(3 * size, size, dtype=torch.float64) * torch.linspace(0.1, 3, size, dtype=torch.float64)
    return vectors.T @ vectors / len(vectors)


@pytest.mark.parametrize(("row", "col"), [(0.7, 0.1), (0.0, 0.02)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_truncation_error_is_the_discarded_energy(name, row, col):
    """In the (A, B) metric, at every rank, measured with symmetric roots."""
    weight = torch.randn(6, 8, dtype=torch.float64)
    inputs, grads = (torch.randn(12, 5, size, dtype=torch.float64) @ random_factor(size) for size in (8, 6))
    # GFWSVD's factors have full rank only where there are several groups.
    factors = facts.estimate_factors(GFWSVD(group_size=1) if name == "gfwsvd" else name, inputs, grads)
    A, B = (None if each is None else shrink(each, by) for each, by in ((factors.A, col), (factors.B, row)))
    expected = discarded_energies(weight, A, B)
    energies = decompose(weight, factors, shrinkage_row=row, shrinkage_col=col).energies
    tolerance = EXACT * float(energies.sum())
    torch.testing.assert_close(energies.sum() - energies.cumsum(dim=0), expected, rtol=0, atol=tolerance)
    for rank in range(1, 7):
        left, right = facts.low_rank_factors(weight, factors, rank, shrinkage_row=row, shrinkage_col=col)
        assert left.shape == (6, rank) and right.shape == (rank, 8)
        error = metric_error(weight - left @ right, A, B)
        assert float(error) == pytest.approx(float(expected[rank - 1]), abs=tolerance)


@pytest.mark.parametrize("shape", [(6, 8), (8, 6)])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_svd_llm_v2_loses_least_on_fewer_tokens_than_inputs(shape, tokens):
    """The outputs are those of the best approximation of rank k; inputs that never occurred give nothing."""
    weight = torch.randn(shape, dtype=torch.float64)
    inputs, grads = (torch.randn(1, tokens, size, dtype=torch.float64) for size in reversed(shape))
    decomposition = decompose(weight, facts.estimate_factors("svd_llm_v2", inputs, grads))
    assert decomposition.num_repaired == 1
    x = inputs[0].T  # [d_in, tokens]
    energies = torch.linalg.svdvals(weight @ x).square()
    nowhere = torch.linalg.svd(x).U[:, tokens:]
    for rank in range(1, 7):
        approximation = torch.mm(*decomposition.truncate(rank))
        lost = ((weight - approximation) @ x).square().sum()
        torch.testing.assert_close(lost, energies[rank:].sum(), rtol=0, atol=EXACT * float(energies.sum()))
        assert (approximation @ nowhere).norm() < EXACT * weight.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float64_inside_and_the_type_of_the_weight_outside(dtype):
    weight = torch.randn(6, 8).to(dtype)
    left, right = facts.low_rank_factors(weight, KroneckerFactors(A=random_factor(8).float()), 6)
    assert left.dtype == right.dtype == dtype
    # Two roundings to the weight's type, or the condition number of A in float64.
    assert relative_error(left.double() @ right.double(), weight.double()) < max(4 * torch.finfo(dtype).eps, EXACT)


@pytest.mark.parametrize("rank", [0, -1, 7])
def test_rank_out_of_range(rank):
    with pytest.raises(ValueError, match=rf"rank must be from 1 to 6 for this layer, got {rank}"):
        facts.low_rank_factors(torch.randn(6, 8), KroneckerFactors(), rank)


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
    grams = torch.stack([random_factor(150) for _ in range(3)])
    weights = torch.randn(3, 20, 150, dtype=torch.float64)
    together = elimination_orders(grams, weights)
    monkeypatch.setattr(elimination, "STEPS_AT_ONCE", 1)
    for order, gram, weight in zip(together, grams, weights, strict=True):
        assert sorted(order.tolist()) == list(range(150))
        assert order.equal(elimination_orders(gram[None], weight[None])[0])


def test_inputs_that_never_occur_leave_first_and_cost_nothing():
    weight, seen = torch.randn(4, 8, dtype=torch.float64), random_factor(8)
    idle = [2, 5]
    seen[idle] = seen[:, idle] = 0
    decomposition = eliminate(weight, KroneckerFactors(seen, random_factor(4)))
    assert decomposition.num_repaired == 1 and {*decomposition.order[-2:].tolist()} == {*idle}
    assert decomposition.energies[-2:].sum() < 1e-5 * decomposition.energies.sum()


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 8, 8), (3, 8, 5)])
@pytest.mark.parametrize("least", [1.0, 1e-4, 1e-9, 0.0])
def test_polar_factors_are_those_of_the_svd(shape, least):
    """The relative error of Q, where it is unique, is that of rounding times the condition number."""
    u, s, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    s[:2, -1] = least * s[:2, 0]
    root, basis = polar((u * s[:, None]) @ vh)
    torch.testing.assert_close(root, (u * s[:, None]) @ u.mT, rtol=0, atol=1e-12)
    if least:
        torch.testing.assert_close(basis, u @ vh, rtol=0, atol=1e-14 / least)


@pytest.mark.parametrize("sides", [("A", "B"), ("A",), ("B",), ()])
def test_products_are_decomposed_together_as_the_matrices_that_they_are(sides):
    """Also if some factors are zero; not if only some have both sides."""
    problems = []
    for scale, row, col in ((1, ROW, COL), (0, ROW, 0.0), (2, 0.5, 0.2)):
        left, right = torch.randn(11, 4, dtype=torch.float64), torch.randn(4, 13, dtype=torch.float64)
        factors = KroneckerFactors(**{side: scale * random_factor({"A": 13, "B": 11}[side]) for side in sides})
        problems.append((left, right, factors, row, col))
    found = decompose_products(problems)
    assert [product.num_repaired for product in found] == [0, len(sides), 0]
    for product, (left, right, factors, row, col) in zip(found, problems, strict=True):
        whole = decompose(left @ right, factors, shrinkage_row=row, shrinkage_col=col)
        torch.testing.assert_close(product.energies, whole.energies[:4], rtol=1e-9, atol=1e-9)
        for rank in range(1, 5):
            approximations = (a @ b for a, b in (product.truncate(rank), whole.truncate(rank)))
            torch.testing.assert_close(*approximations, rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match="differ in their sides"):
        decompose_products([*problems, (left, right, replace(factors, A=None if "A" in sides else right), 0.0, 0.0)])


def heads(num_groups, num_features=15):
    """Four heads of width 3 with biases, in groups."""
    queries, outputs = torch.randn(2, 4, 3, num_features, dtype=torch.float64)
    keys, values = torch.randn(2, num_groups, 3, num_features, dtype=torch.float64)
    biases = torch.randn(4, 3, dtype=torch.float64), *torch.randn(2, num_groups, 3, dtype=torch.float64), None
    return Heads(None, queries, keys, values, outputs.mT, *biases, scale=1.0)


@pytest.mark.parametrize(("product", "num_groups"), [("scores", 4), ("outputs", 4), ("outputs", 2)])
def test_cores_are_truncated_as_products_of_all_features(product, num_groups):
    whole = heads(num_groups)
    if product == "scores":
        framed, cores = score_cores(whole)
        right, rights = (torch.cat([each.queries, each.query_bias[..., None]], dim=-1) for each in (whole, framed))
        left, lefts = whole.keys.mT, framed.keys
    else:
        framed, cores = output_cores(whole)
        left, lefts = (each.outputs.unflatten(0, (num_groups, -1)) for each in (whole, framed))
        lefts, right, rights = lefts.mT.flatten(1, 2), whole.values, framed.values
    factors = [KroneckerFactors(random_factor(right.shape[-1]), random_factor(15)) for _ in cores]
    bases = list(zip(lefts, rights, strict=True))
    inner = [KroneckerFactors(b @ each.A @ b.T, a @ each.B @ a.T) for each, (a, b) in zip(factors, bases, strict=True)]
    found = decompose_products([(*core.factors(), each, 0.0, 0.0) for core, each in zip(cores, inner, strict=True)])
    expected = decompose_products([(*each, 0.0, 0.0) for each in zip(left, right, factors, strict=True)])
    for one, other, (outputs, inputs) in zip(found, expected, bases, strict=True):
        torch.testing.assert_close(one.energies, other.energies[:3], rtol=1e-9, atol=1e-9)
        for rank in range(1, 4):
            (inner_left, inner_right), (a, b) = one.truncate(rank), other.truncate(rank)
            products = (outputs.T @ inner_left @ inner_right @ inputs).reshape(-1), (a @ b).reshape(-1)
            torch.testing.assert_close(*products, rtol=1e-7, atol=1e-9)


def test_the_change_of_weight_and_bias_is_the_best_of_its_rank():
    """The shift against least squares, the cost against the singular values that are left out."""
    inputs = torch.randn(60, 7, dtype=torch.float64) * torch.rand(7, dtype=torch.float64) + torch.randn(7).double()
    root = torch.randn(60, 5, dtype=torch.float64).norm(dim=1, keepdim=True)
    weight = torch.randn(5, 7, dtype=torch.float64)
    weighted = root * torch.cat([inputs, torch.ones(60, 1)], dim=1)
    decomposition = decompose(weight, centred(KroneckerFactors(A=weighted.T @ weighted), inputs.mean(dim=0)))
    left, right = decomposition.truncate(2)
    shift = (weight - left @ right) @ decomposition.mean
    changes = inputs @ (weight - left @ right).T
    torch.testing.assert_close((root * (changes - shift)).square().sum(), decomposition.energies[2:].sum())
    torch.testing.assert_close(shift, torch.linalg.lstsq(root, root * changes).solution[0])


@pytest.mark.parametrize("decades", [0.5, 3, 7, 20])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (20, 20), (1, 5)])
def test_values_product_and_energies_are_those_of_the_svd(shape, decades):
    """To 1e-9 of the whole energy, as the squares of a float64 matrix allow; every truncation is as good."""
    left, right = (torch.linalg.qr(torch.randn(size, min(shape), dtype=torch.float64)).Q for size in shape)
    matrix = left * torch.logspace(0, -decades, min(shape), dtype=torch.float64) @ right.T
    u, s, vh = by_gram(matrix)
    expected = torch.linalg.svdvals(matrix)
    torch.testing.assert_close(u * s @ vh, matrix, rtol=0, atol=1e-12)
    torch.testing.assert_close(s.square(), expected.square(), rtol=0, atol=1e-9)
    assert (s.diff() <= 0).all()
    for rank in range(1, len(s) + 1):
        lost = (matrix - u[:, :rank] * s[:rank] @ vh[:rank]).square().sum()
        torch.testing.assert_close(lost, expected[rank:].square().sum(), rtol=0, atol=1e-9)


def fails(matrix):
    raise torch.linalg.LinAlgError("the algorithm failed to converge")


def is_nan(matrix):
    return matrix * torch.nan


@pytest.mark.parametrize("on_gpu", [fails, is_nan])
@pytest.mark.parametrize("solver", [torch.linalg.eigvalsh, torch.linalg.eigh])
def test_the_cpu_solves_what_a_gpu_does_not(solver, on_gpu):
    matrix = torch.diag(torch.tensor([2.0, 1.0, 1.0]))
    with pretended_cuda():
        found = solved(lambda each: on_gpu(each) if each.is_cuda else solver(each), matrix.cuda())
        values = found if isinstance(found, torch.Tensor) else found[0]
        assert values.is_cuda and values.tolist() == [1, 1, 2]


@pytest.mark.parametrize("solver", [torch.linalg.eigh, fails, is_nan])
def test_what_no_device_solves_is_an_error(solver):
    with pytest.raises(torch.linalg.LinAlgError):
        solved(solver, torch.full((64, 64), torch.nan))
