"""A3's, MoDeGPT's and CORP's choices against brute force on the inputs themselves."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from sklearn.covariance import OAS
from torch import nn

import facts
from experiments.baselines.corp import CORPSearch, shrinkage, without_features, without_units
from experiments.baselines.units import A3Search, MoDeGPTSearch, block_influence, by_leverage, by_outputs, error_of
from facts.estimators import SVDLLM
from facts.modules.lowrank import LowRankLinear
from facts.parts.attention import OutputUnit, ScoreUnit
from facts.parts.hidden import HiddenUnit
from facts.search import AllocationProblem
from tests.networks import image_batches, make_vit, relative_error, seen_by


@pytest.fixture
def problem() -> AllocationProblem:
    batches = image_batches([8, 8], shape=(3, 16, 16))
    calibration = facts.prepare(make_vit(), batches, held_out=(), parts="units")
    decompositions = calibration.decompositions(SVDLLM())
    return AllocationProblem(calibration, SVDLLM(), decompositions, {"flops": 0.5}, sensitivity=batches)


def first_unit(problem, kind):
    return next(unit for unit in problem.calibration.units.values() if isinstance(unit, kind))


def images_of(problem):
    return torch.cat([images for images, _ in problem.calibration.data])


def inputs_of(problem, kind):
    """A call of the first unit of a kind, its layer, and its inputs `[T, n]`."""
    call = first_unit(problem, kind).linears[0]
    layer = problem.calibration.linears[call]
    return call, layer, seen_by(layer, problem.calibration.rewritten, images_of(problem))


def projected_of(problem, name):
    """Queries, keys or values of the first head of the first unit, `[T, d]`, and the bias that queries have."""
    module, heads = first_unit(problem, ScoreUnit).heads(problem.model)
    projected = seen_by(module, problem.model, images_of(problem)) @ getattr(heads, name)[0].T
    return projected + heads.query_bias[0] if name == "queries" else projected


def test_a3_has_the_least_error_of_all_scores(problem):
    """By Eckart and Young, no matrix of the rank is nearer to that of all scores."""
    call, layer, x = inputs_of(problem, ScoreUnit)
    queries, keys = (projected_of(problem, name) for name in ("queries", "keys"))
    exact, y = queries @ keys.T, keys @ layer.left.inverse()
    check_least_error(problem, call, exact, lambda weight: x @ weight.T @ y.T)


def test_a3_has_the_least_error_of_the_outputs_of_a_head(problem):
    call, layer, x = inputs_of(problem, OutputUnit)
    check_least_error(problem, call, x @ layer.weight.T, lambda weight: x @ weight.T)


def check_least_error(problem, call, exact, outputs):
    found = A3Search().decompositions(problem)[call]
    for rank in range(1, len(found.energies) + 1):
        left, right = found.truncate(rank)
        least = torch.linalg.svdvals(exact)[rank:].square().sum()
        error = (outputs(left @ right) - exact).square().sum()
        assert error.item() == pytest.approx(least.item(), rel=1e-4, abs=1e-6 * exact.square().sum().item())


def test_a3_keeps_the_hidden_units_that_add_most_to_outputs():
    torch.manual_seed(0)
    x, weight = torch.randn(30, 7).double() * torch.rand(7), torch.randn(3, 7).double()
    found = by_outputs(weight, x.T @ x / len(x))
    sizes = torch.stack([torch.outer(x[:, j], weight[:, j]).norm() for j in range(7)])
    assert found.order.tolist() == sizes.argsort(descending=True).tolist()
    left, right = found.truncate(4)
    assert torch.equal(left @ right, torch.where(torch.isin(torch.arange(7), found.order[:4]), weight, 0))


def test_a3_keeps_one_share_and_at_full_width_the_network(problem):
    plan = A3Search().allocate(problem).plan
    assert problem.fits(plan)
    assert plan == {name: part.rank_of_ratio(0.5) for name, part in problem.parts.items()}
    whole = {name: part.largest for name, part in problem.parts.items()}
    (images, _), *_ = problem.calibration.data
    network = problem.calibration.apply(whole, A3Search().decompositions(problem))
    assert relative_error(network(images), problem.model(images)) < 1e-4


def test_corp_brings_scores_nearest_over_all_pairs_of_tokens():
    torch.manual_seed(0)
    x, ridge = torch.randn(20, 6).double() @ torch.randn(6, 6).double(), 0.7
    layer, y = LowRankLinear(torch.randn(5, 4).double(), torch.randn(4, 6).double()), torch.randn(20, 5).double()
    queries, keys = x @ layer.right.T, y @ layer.left
    scores = (queries * keys).square().sum(dim=0)
    found = without_features(layer, x.T @ x, y.T @ y, scores, rank=2, ridge=ridge)
    kept, gone = scores.argsort(descending=True).split([2, 2])
    pairs = list(itertools.product(range(20), repeat=2))
    A = torch.stack([torch.outer(queries[i][kept], keys[j][kept]).flatten() for i, j in pairs])
    missing = torch.stack([queries[i][gone] @ keys[j][gone] for i, j in pairs])
    M = torch.linalg.solve(A.T @ A + ridge * torch.eye(4), A.T @ missing).reshape(2, 2)
    expected = queries[:, kept] @ (torch.eye(2) + M) @ keys[:, kept].T
    left, right = found.truncate(2)
    assert relative_error((x @ right.T) @ (y @ left).T, expected) < 1e-10


@pytest.mark.parametrize("bias", [True, False])
def test_corp_regresses_hidden_units_that_leave_on_those_that_stay(bias):
    torch.manual_seed(0)
    x, ridge = torch.randn(40, 7).double() @ torch.randn(7, 7).double() + torch.randn(7).double(), 20.0
    layer = nn.Linear(7, 3, bias=bias).double()
    found = without_units(layer, x.T @ x, x.sum(dim=0), 40, torch.arange(7.0), rank=4, ridge=ridge)
    kept, gone = [6, 5, 4, 3], [2, 1, 0]
    mean = x.mean(dim=0) if bias else torch.zeros(7)
    centred = x - mean
    rows = torch.cat([centred[:, kept], (40 * ridge) ** 0.5 * torch.eye(4)])
    B = torch.linalg.lstsq(rows, F.pad(centred[:, gone], (0, 0, 0, 4))).solution
    restored = x.clone()
    restored[:, gone] = centred[:, kept] @ B + mean[gone]
    left, right = found.truncate(4)
    outputs = F.linear(x, left @ right, found.bias(layer, 4))
    assert relative_error(outputs, layer(restored)) < 1e-10 and found.order[:4].tolist() == kept


def test_shrinkage_is_nearly_that_of_scikit_learn():
    """Which leaves 2 / p out of the formula, and whose share is of the mean variance."""
    x = torch.randn(150, 200, generator=torch.Generator().manual_seed(0)).double() * torch.linspace(0.1, 3, 200)
    covariance, share = x.T @ x / 150, OAS(assume_centered=True).fit(x.numpy()).shrinkage_
    assert shrinkage(covariance, 150) == pytest.approx(share * covariance.trace().item() / 200, rel=0.02)
    assert shrinkage(torch.ones(1, 1), 15) == 1


def test_corp_ranks_by_a_tokens_own_products_and_by_active_units(problem):
    search = CORPSearch(active=0.5)
    call, _, _ = inputs_of(problem, ScoreUnit)
    hidden, _, units = inputs_of(problem, HiddenUnit)
    sums = search.sums(problem, {call, hidden})
    products = projected_of(problem, "queries") * projected_of(problem, "keys")
    torch.testing.assert_close(sums[call], products.square().sum(dim=0).double(), rtol=1e-4, atol=1e-6)
    halves = units.chunk(2)  # batches
    active = sum((half.abs() > 0.5 * half.square().mean().sqrt()).double().sum(dim=0) for half in halves)
    torch.testing.assert_close(sums[hidden], active)


def test_corp_leaves_values_and_outputs_and_spends_the_budget_on_the_rest(problem):
    search = CORPSearch()
    result = search.allocate(problem)
    outputs = {name for name, unit in problem.calibration.units.items() if isinstance(unit, OutputUnit)}
    assert {name for name, rank in result.plan.items() if rank is None} == outputs
    network = problem.calibration.apply(result.plan, result.decompositions)
    costs = [facts.count_cost(each, (3, 16, 16)).flops for each in (network, problem.model)]
    assert problem.fits(result.plan) and costs[0] < costs[1]
    narrowest = AllocationProblem(problem.calibration, SVDLLM(), problem.decompositions, {"flops": 0.01})
    with pytest.raises(ValueError, match="CORP leaves values and outputs as they are"):
        search.allocate(narrowest)


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


def test_influence_is_the_angle_between_a_token_before_and_after_a_block(problem):
    tokens, model = [], problem.model
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, outputs: tokens.append((inputs[0], outputs)))
    model(images_of(problem))
    expected = [1 - (F.normalize(a, dim=-1) * F.normalize(b, dim=-1)).sum(dim=-1).mean().item() for a, b in tokens]
    assert list(block_influence(problem).values()) == pytest.approx(expected)


def test_at_full_width_the_network_stays_the_same_and_a_temperature_divides_the_removal(problem):
    search = MoDeGPTSearch()
    full = {name: part.largest for name, part in problem.parts.items()}
    assert error_of(problem, problem.calibration.apply(full, search.decompositions(problem))) < 1e-10
    influence = dict(zip((f"blocks.{number}" for number in range(3)), (0.1, 0.2, 0.5), strict=True))
    plan = search.plan(problem, influence, temperature=1.0)
    assert problem.fits(plan) and plan.keys() == problem.parts.keys()
    removed = [1 - plan[f"blocks.{number}.mlp"] / full[f"blocks.{number}.mlp"] for number in range(3)]
    shares = [torch.exp(torch.tensor(-each)).item() for each in influence.values()]
    for number in (1, 2):  # widths are whole numbers
        expected = removed[0] * shares[number] / shares[0]
        assert removed[number] == pytest.approx(expected, abs=2 / full[f"blocks.{number}.mlp"])
