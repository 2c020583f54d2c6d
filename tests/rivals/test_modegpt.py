"""MoDeGPT's choices, against their formulas on the inputs themselves."""

import pytest
import torch
import torch.nn.functional as F

from experiments.rivals.search.modegpt import MoDeGPTSearch, block_influence, by_leverage, by_norms, error_of
from facts.modules.lowrank import LowRankLinear
from tests.networks import relative_error


def test_hidden_units_stay_by_leverage_with_least_squares_weights():
    torch.manual_seed(0)
    inputs, weight = torch.randn(40, 7).double() @ torch.randn(7, 7).double(), torch.randn(3, 7).double()
    gram, ridge = inputs.T @ inputs, 0.5
    found = by_leverage(weight, gram, ridge)
    scores = (gram @ torch.linalg.inv(gram + ridge * gram.diagonal().mean() * torch.eye(7))).diagonal()
    assert found.order.tolist() == scores.argsort(descending=True).tolist()
    for rank in range(1, 8):
        kept, (left, right) = found.order[:rank], found.truncate(rank)
        expected = torch.linalg.lstsq(inputs[:, kept], inputs @ weight.T).solution.T
        assert relative_error((left @ right)[:, kept], expected) < 1e-8
        assert set((left @ right).abs().sum(dim=0).nonzero().flatten().tolist()) <= set(kept.tolist())


def test_features_of_queries_and_keys_stay_by_the_product_of_their_norms():
    torch.manual_seed(0)
    x, y = torch.randn(50, 7).double(), torch.randn(50, 6).double()
    layer = LowRankLinear(torch.randn(6, 4).double(), torch.randn(4, 7).double())
    found = by_norms(layer, x.T @ x, y.T @ y)
    norms = (x @ layer.right.T).norm(dim=0) * (y @ layer.left).norm(dim=0)
    order = norms.argsort(descending=True)
    assert found.left.equal(layer.left[:, order].detach()) and found.right.equal(layer.right[order].detach())


def test_influence_is_the_angle_between_a_token_before_and_after_a_block(problem):
    tokens, model = [], problem.model
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, outputs: tokens.append((inputs[0], outputs)))
    with torch.no_grad():
        model(torch.cat([images for images, _ in problem.calibration.data]))
    expected = [1 - (F.normalize(a, dim=-1) * F.normalize(b, dim=-1)).sum(dim=-1).mean().item() for a, b in tokens]
    assert list(block_influence(problem).values()) == pytest.approx(expected)


def test_at_full_width_the_network_stays_the_same_and_a_temperature_divides_the_removal(problem):
    search = MoDeGPTSearch()
    full = {name: part.largest() for name, part in problem.parts.items()}
    assert error_of(problem, problem.apply(full, search.decompositions(problem))) < 1e-10
    influence = dict(zip((f"blocks.{number}" for number in range(3)), (0.1, 0.2, 0.5), strict=True))
    plan = search.plan(problem, influence, temperature=1.0)
    assert problem.fits(plan) and plan.keys() == problem.parts.keys()
    removed = [1 - plan[f"blocks.{number}.mlp"] / full[f"blocks.{number}.mlp"] for number in range(3)]
    shares = [torch.exp(torch.tensor(-each)).item() for each in influence.values()]
    for number in (1, 2):  # widths are whole numbers
        expected = removed[0] * shares[number] / shares[0]
        assert removed[number] == pytest.approx(expected, abs=2 / full[f"blocks.{number}.mlp"])
