"""Factors that fit outputs best, against least squares on the inputs themselves and against gradient descent."""

import torch

from facts.refit.least_squares import best_left, best_right

torch.manual_seed(0)
INPUTS, OUTPUTS = torch.randn(40, 6, dtype=torch.float64), torch.randn(40, 5, dtype=torch.float64)
WEIGHT, LEFT, RIGHT = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 6), (5, 2), (2, 6)))
TARGET, GRAM = OUTPUTS.T @ INPUTS, INPUTS.T @ INPUTS


def test_left_of_inputs_that_reach_one_component_only():
    """The other component, which no input has, gets nothing."""
    right = torch.stack([RIGHT[0], torch.zeros(6, dtype=torch.float64)])
    left = best_left(TARGET, GRAM, right)
    expected = torch.linalg.lstsq(INPUTS @ right[:1].T, OUTPUTS).solution.T
    torch.testing.assert_close(left[:, :1], expected)
    assert not left[:, 1].any()


def test_right_where_there_are_no_data():
    """Directions that no input has are those of the original weight, as near as U comes to them."""
    inputs = INPUTS * torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.float64)
    right = best_right(OUTPUTS.T @ inputs, inputs.T @ inputs, LEFT, WEIGHT, ridge=0.0)
    torch.testing.assert_close(right[:, 5], torch.linalg.lstsq(LEFT, WEIGHT[:, 5]).solution)
    seen = torch.linalg.lstsq(INPUTS[:, :5], OUTPUTS).solution.T
    torch.testing.assert_close(right[:, :5], torch.linalg.lstsq(LEFT, seen).solution)
