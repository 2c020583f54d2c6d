"""Measured sensitivities equal the plain procedure, and are measured once."""

import copy

import pytest
import torch

import facts
from facts.modules.lowrank import LowRankLinear
from facts.moments.losses import kl_divergence, squared_error
from facts.search import CoRS
from facts.search.sensitivity.measured import Sensitivity
from tests.networks import Runs, image_batches, make_model
from tests.search.problems import every_rank, make_problem


def kl(original, changed):
    """Σ p (log p - log q), mean over samples, by the definition."""
    p, q = original.softmax(dim=-1), changed.softmax(dim=-1)
    return (p * (p / q).log()).sum(dim=-1).mean().item()


@torch.no_grad()
def plain(problem, name, rank, read):
    """One whole pass of a copy with one layer replaced, over all samples at once."""
    changed = copy.deepcopy(problem.model)
    changed.set_submodule(name, LowRankLinear(*problem.decompositions[name].truncate(rank), problem.layers[name].bias))
    images = torch.cat([images for images, _ in problem.sensitivity])
    return read(problem.model, images), read(changed, images)


def features(model, images, layer="head"):
    seen = []
    hook = model.get_submodule(layer).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(images)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("sizes", [(7,), (1, 5, 1)])
def test_errors_are_those_of_whole_passes(sizes):
    problem = make_problem(sizes=sizes)
    profile = Sensitivity(problem).profile(every_rank(problem))
    for name, errors in profile.items():
        for rank, error in errors.items():
            expected = kl(*plain(problem, name, rank, lambda model, images: model(images)))
            assert error == pytest.approx(expected, rel=1e-9, abs=1e-15), (name, rank)
    assert max(errors[1] for errors in profile.values()) > 1e-5  # compression does show


def test_features_are_what_the_last_linear_layer_sees():
    problem = make_problem()
    profile = Sensitivity(problem, of="features").profile({"grid": [2], "vector": [1, 3]})
    for name, errors in profile.items():
        for rank, error in errors.items():
            original, changed = plain(problem, name, rank, features)
            expected = ((changed - original).square().sum(1) / original.square().sum(1)).mean().item()
            assert error == pytest.approx(expected, rel=1e-9)


comparisons = []


def noted_divergence(original, changed):
    comparisons.append(len(original))
    return kl_divergence(original, changed)


def test_what_was_measured_is_not_measured_again(tmp_path):
    ranks = {"grid": [1, 2], "tokens": [3]}
    problem = make_problem(cache=tmp_path, output_error=noted_divergence)
    first = Sensitivity(problem)
    profile = first.profile(ranks)
    comparisons.clear()
    again, runs = Sensitivity(problem), Runs(problem.model)
    assert again.profile(ranks) == profile and not runs.number
    more = again.profile({"grid": [1, 4]})
    assert comparisons == [4, 3] and more["grid"][1] == profile["grid"][1]  # two batches, one new rank


@pytest.mark.parametrize(
    "fields", [{"sensitivity": image_batches([4, 3], seed=9)}, {"output_error": squared_error}], ids=["data", "error"]
)
def test_other_data_and_another_error_are_measured_for_themselves(tmp_path, fields):
    ranks = {"grid": [1]}
    first = Sensitivity(make_problem(cache=tmp_path)).profile(ranks)
    other = Sensitivity(make_problem(cache=tmp_path, **fields)).profile(ranks)
    assert first["grid"][1] != other["grid"][1]
    assert Sensitivity(make_problem(cache=tmp_path)).profile(ranks) == first


def test_another_budget_and_another_search_cost_no_pass(tmp_path, no_comparison):
    model, batches = make_model(), image_batches([8, 8])
    first = facts.compress(model, batches, search="cors", ratio=0.7, execution=facts.Execution(cache=tmp_path))
    runs = Runs(model)
    again = facts.compress(
        model, batches, search=CoRS(interpolation="linear"), ratio=0.6, execution=facts.Execution(cache=tmp_path)
    )
    assert again.summary.profile == first.summary.profile and runs.number == 1  # to see what it gives


def nowhere(original, changed):
    return original.sum() * float("nan")


def test_an_error_that_is_not_a_number_names_layer_and_rank(tmp_path):
    with pytest.raises(ValueError, match=r"layer grid at rank \[2\] is NaN"):
        Sensitivity(make_problem(cache=tmp_path, output_error=nowhere)).profile({"grid": [2]})
    assert not list(tmp_path.rglob("sensitivity-*"))


@pytest.mark.parametrize(("data", "message"), [([], "sensitivity data is empty"), (None, "give calibration or")])
def test_data_that_are_missing(data, message):
    with pytest.raises(ValueError, match=message):
        Sensitivity(make_problem(sensitivity=data)).profile({"grid": [1]})
