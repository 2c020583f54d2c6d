"""Second-order sensitivities against per-sample gradients and dense Kronecker products."""

import pytest
import torch

from facts.estimators import FACTS
from facts.estimators.whitening import shrink
from facts.moments.losses import SampledLabels
from facts.search import CoRSFisher
from facts.search.sensitivity_fisher import exact_profiles, kronecker_profile
from tests.finetuning.setting import Reads
from tests.networks import image_batches, numbered
from tests.refusals import refuses
from tests.search.problems import every_rank, make_problem, truncated


def sample_gradients(problem, targets):
    """∇_W of each sample's own loss, by layer: `[N, d_out, d_in]`; a layer used twice has one gradient."""
    images = torch.cat([images for images, _ in problem.sensitivity])
    grads = {name: [] for name in problem.layers}
    for image, target in zip(images, targets, strict=True):
        loss = problem.prepared.loss(problem.model(image[None]), target[None])
        weights = [layer.weight for layer in problem.layers.values()]
        for name, grad in zip(problem.layers, torch.autograd.grad(loss, weights), strict=True):
            grads[name].append(grad)
    return {name: torch.stack(values) for name, values in grads.items()}


def brute_force(problem, grads, name, rank):
    """½ mean_b ⟨∇_W L_b, W - W_r⟩²."""
    discarded = problem.layers[name].weight.detach() - (truncated(problem, name, rank) if rank else 0)
    return 0.5 * (grads[name] * discarded).sum(dim=(1, 2)).square().mean().item()


def test_exact_profile_is_that_of_per_sample_gradients():
    problem = make_problem(sizes=(4, 3))
    profiles = exact_profiles(problem, "given", seed=0)
    grads = sample_gradients(problem, torch.cat([labels for _, labels in problem.sensitivity]))
    for name, ranks in every_rank(problem).items():
        profile = profiles[name]
        assert len(profile) == len(ranks) + 1 and profile[-1] == 0
        scale = profile.max().item()
        for rank in (0, *ranks[:-1]):
            expected = brute_force(problem, grads, name, rank)
            assert profile[rank].item() == pytest.approx(expected, rel=1e-9, abs=1e-13 * scale), (name, rank)


def test_labels_are_drawn_from_the_network():
    problem = make_problem(sizes=(7,))
    (images, _), drawn = next(iter(problem.sensitivity)), []
    SampledLabels(lambda outputs, labels: drawn.append(labels), seed=3)(problem.model(images), None)
    grads = sample_gradients(problem, drawn[0])
    profiles = exact_profiles(problem, "sampled", seed=3)
    for name in problem.layers:
        assert profiles[name][1].item() == pytest.approx(brute_force(problem, grads, name, 1), rel=1e-9)
    other = exact_profiles(problem, "sampled", seed=4)
    assert any(not profiles[name].equal(other[name]) for name in problem.layers)


def test_kronecker_profile_is_half_the_discarded_energy_in_the_shrunk_metric_and_needs_both_sides():
    problem = make_problem()
    moments = problem.prepared.moments(FACTS().moments)
    for name, layer in problem.layers.items():
        factors = FACTS().factors(moments[name])
        A, B = shrink(factors.A.double(), 0.1), shrink(factors.B.double(), 0.7)
        profile = kronecker_profile(problem, name)
        for rank in (1, 3):
            change = layer.weight.detach() - truncated(problem, name, rank)
            assert profile[rank].item() == pytest.approx(0.5 * torch.trace(change.T @ B @ change @ A).item(), rel=1e-9)
        assert profile[-1] == 0
    refuses("this estimator has none", CoRSFisher(profile="kronecker").allocate, make_problem("svd_llm"))


def test_profiles_are_kept(tmp_path):
    reads = Reads()
    data = numbered(image_batches([4, 3], seed=2), reads, "images")
    problem, num_read = make_problem(cache=tmp_path, sensitivity=data), reads.count
    first, again = (exact_profiles(problem, "sampled", seed=0) for _ in range(2))
    assert all(first[name].equal(again[name]) for name in first)
    assert reads.count == num_read + 2
    for number, options in enumerate((("sampled", 1), ("given", 0)), 2):  # other labels are another profile
        exact_profiles(problem, *options)
        assert reads.count == num_read + 2 * number
