"""On a published ViT-Tiny and real photos: does each weighting help as it should?"""

import pytest

# One photo of 650 is 0.15 points.
FLAR_BEHIND_SVD_LLM = 2.0


def test_dense_accuracy_is_that_of_the_published_network(accuracies):
    assert accuracies["dense"] > 78


@pytest.mark.parametrize(
    ("better", "worse"),
    [("facts", "flar"), ("kfac_expand", "flar"), ("svd_llm", "asvd")],
)
def test_order_of_methods(accuracies, better, worse):
    assert accuracies[better] > accuracies[worse], accuracies


def test_asvd_is_no_worse_than_the_plain_svd(accuracies):
    assert accuracies["asvd"] >= accuracies["pela"], accuracies


def test_flar_stays_near_svd_llm(accuracies):
    assert accuracies["flar"] >= accuracies["svd_llm"] - FLAR_BEHIND_SVD_LLM, accuracies
