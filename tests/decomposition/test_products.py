"""Products of two matrices, decomposed without being formed."""

import pytest
import torch

from facts.decomposition.truncation import decompose, decompose_product
from facts.estimators import KroneckerFactors
from facts.parts.attention import Heads, output_cores, score_cores
from tests.decomposition.test_decomposition import random_factor

ROW, COL = 0.3, 0.1


@pytest.mark.parametrize("sides", [("A", "B"), ("A",), ("B",), ()])
def test_a_product_is_decomposed_as_the_matrix_that_it_is(sides):
    left, right = torch.randn(11, 4, dtype=torch.float64), torch.randn(4, 13, dtype=torch.float64)
    factors = KroneckerFactors(**{side: random_factor({"A": 13, "B": 11}[side]) for side in sides})
    product = decompose_product(left, right, factors, shrinkage_row=ROW, shrinkage_col=COL)
    whole = decompose(left @ right, factors, shrinkage_row=ROW, shrinkage_col=COL)
    torch.testing.assert_close(product.energies, whole.energies[:4], rtol=1e-9, atol=1e-9)
    for rank in range(1, 5):
        found, expected = (a @ b for a, b in (product.truncate(rank), whole.truncate(rank)))
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def heads(num_groups, num_features=15):
    """Four heads of width 3 with biases, in groups."""
    (queries, outputs), (keys, values) = (
        torch.randn(2, number, 3, num_features, dtype=torch.float64) for number in (4, num_groups)
    )
    biases = torch.randn(4, 3, dtype=torch.float64), *torch.randn(2, num_groups, 3, dtype=torch.float64), None
    return Heads(queries, keys, values, outputs.mT, *biases, scale=1.0)


def test_cores_of_scores_are_truncated_as_products_of_all_features():
    whole = heads(num_groups=4)
    framed, cores = score_cores(whole)
    queries = torch.cat([whole.queries, whole.query_bias[..., None]], dim=-1)
    bases = torch.cat([framed.queries, framed.query_bias[..., None]], dim=-1)
    for head, core in enumerate(cores):
        A, B = random_factor(16), random_factor(15)
        expected = decompose(whole.keys[head].T @ queries[head], KroneckerFactors(A, B))
        right, left = bases[head], framed.keys[head]
        found = decompose_product(*core.factors(), KroneckerFactors(right @ A @ right.T, left @ B @ left.T))
        check_same(left.T, found, right, expected)


@pytest.mark.parametrize("num_groups", [4, 2])
def test_cores_of_outputs_are_truncated_as_products_of_all_features(num_groups):
    whole = heads(num_groups)
    framed, cores = output_cores(whole)
    groups = whole.outputs.unflatten(0, (num_groups, -1))
    for group, core in enumerate(cores):
        A, B = random_factor(15), random_factor(15)
        expected = decompose_product(groups[group], whole.values[group], KroneckerFactors(A, B))
        right, left = framed.values[group], framed.outputs.unflatten(0, (num_groups, -1))[group].mT.flatten(0, 1)
        found = decompose_product(*core.factors(), KroneckerFactors(right @ A @ right.T, left @ B @ left.T))
        check_same(left.T, found, right, expected)


def check_same(left, found, right, expected):
    """The truncations of a core, between two bases, are those of the whole product."""
    torch.testing.assert_close(found.energies, expected.energies[:3], rtol=1e-9, atol=1e-9)
    for rank in range(1, 4):
        (inner, outer), (a, b) = found.truncate(rank), expected.truncate(rank)
        products = (left @ inner @ outer @ right).reshape(-1), (a @ b).reshape(-1)
        torch.testing.assert_close(*products, rtol=1e-7, atol=1e-9)
