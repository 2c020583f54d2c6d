"""The own rule of each smaller rival; trainings that go on after an interruption."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import facts
from experiments.rivals.refit.memvit import MemViTResidual
from experiments.rivals.refit.randomized_svd import RandomizedSVD
from experiments.rivals.refit.saes_svd import SAESSVD
from experiments.rivals.search.aafm import AAFMSearch
from experiments.rivals.search.ars import ARSSearch, MaskedLayer
from experiments.rivals.search.dobi_svd import DobiSVDSearch
from experiments.rivals.search.fastlrd import FastLRDSearch
from experiments.rivals.search.flora import FLORASearch
from facts.decomposition.truncation import decompose
from facts.estimators.base import KroneckerFactors
from facts.modules.forms import FORMS
from facts.search import ComCatSearch
from tests.finetuning.setting import Reads, Watched, interrupt
from tests.networks import compress_on_all, image_batches, relative_error
from tests.oracles.truncation import discarded_energies, metric_error, symmetric_root
from tests.refit.test_refits import LAYERS, OPTIONS, chain, compressed_up_to, inputs_of  # noqa: F401
from tests.search.problems import losing, make_problem, plain_problem


@pytest.mark.parametrize(
    ("search", "before", "after"),
    [
        (ComCatSearch(num_epochs=6, learning_rate=0.1), 0, 0),
        (DobiSVDSearch(num_epochs=6), 1, 2),  # a batch gives the loss's unit, and both make the weights
    ],
    ids=["comcat", "dobi_svd"],
)
def test_training_goes_on_as_if_it_had_not_been_interrupted(search, before, after, tmp_path):
    """The third epoch ends early; of the six of 2 batches each, two need not run again, and then none."""
    expected = search.allocate(make_problem())

    def batches(reads):
        calibration = Watched(image_batches([8, 8]), reads)
        calibration.content_key = "images"
        return calibration

    with pytest.raises(KeyboardInterrupt):
        search.allocate(make_problem(data=batches(Reads(before + 6, interrupt)), cache=tmp_path))
    for count in (8, 0):
        reads = Reads()
        again = search.allocate(make_problem(data=batches(reads), cache=tmp_path))
        assert reads.count == before + count + after
        assert again.plan == expected.plan and again.solution == expected.solution
        for name, decomposition in (expected.decompositions or {}).items():
            assert again.decompositions[name].left.equal(decomposition.left)


@pytest.mark.parametrize(
    "search",
    [
        ARSSearch(num_epochs=40, learning_rate=0.01, budget_weight=1, alignment_weight=1),
        ComCatSearch(num_epochs=20, learning_rate=0.1),
        DobiSVDSearch(num_epochs=40, learning_rates=(0.01, 0.005)),
        FLORASearch(num_epochs=2),
    ],
)
def test_training_moves_ranks_to_the_layer_that_matters(search):
    """Of two layers of one shape the outputs of one are all but ignored; the other ends with more of the budget."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.ignored = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, images):
            x = images.flatten(1)[:, :12]
            return 5 * self.used(x) + 1e-3 * self.ignored(x)

    torch.manual_seed(0)
    model, batches = Fork(), image_batches([32] * 4, num_classes=12, dtype=torch.float32)
    batches = [(images, model(images).argmax(dim=1)) for images, _ in batches]
    plan = facts.compress(model, batches, search=search, ratio=0.6).plan
    assert (plan["used"] or 12) > (plan["ignored"] or 12)


def test_ars_keeps_the_components_of_the_largest_logits_that_fit(monkeypatch):
    """Against all plans of two layers: sums of logits of the leading components, or of all for a dense layer."""
    logits = {"a": torch.linspace(2, -4, 20), "b": torch.linspace(1, -3, 20)}
    network = type("Given", (nn.ParameterList,), {"__call__": lambda self: [*self]})(logits.values())
    monkeypatch.setattr("experiments.rivals.search.ars.seeded_hypernetwork", lambda widths, seed: network)
    monkeypatch.setattr("experiments.rivals.search.ars.Training.run", lambda *arguments: None)
    problem = losing(dict.fromkeys(logits, 1.0), ratio=0.4)
    plan = ARSSearch(offset=1.0).allocate(problem).plan
    sums = {name: (each + 1).double().cumsum(0) for name, each in logits.items()}
    plans = [dict(zip("ab", ranks, strict=True)) for ranks in itertools.product([*range(1, 11), None], repeat=2)]

    def total(plan):
        return sum(sums[name][(rank or 20) - 1].item() for name, rank in plan.items())

    assert problem.fits(plan) and total(plan) == pytest.approx(max(map(total, filter(problem.fits, plans))))


@pytest.mark.parametrize("form", FORMS)
def test_ars_adds_the_cost_of_components_and_leaves_aligned_masks_alone(form):
    problem = make_problem(form=FORMS[form], bounds={"flops": 0.6, "params": 0.6})
    layer = MaskedLayer(problem, "windows")
    for rank in range(1, 11):
        layer.mask = (torch.arange(10) < rank).float()
        assert layer.cost().tolist() == pytest.approx(problem.cost("windows", rank)) and layer.misalignment() == 0
    layer.mask = layer.mask.flip(0) * (torch.arange(10) > 0)
    assert layer.misalignment() > 0


@pytest.mark.parametrize(("ratio", "plan"), [(0.8, (6, None)), (0.6, (6, 6)), (0.5, (6, 3)), (0.4, (3, 3))])
def test_aafm_takes_the_step_that_raises_the_error_least_for_its_cost(ratio, plan, monkeypatch):
    """Of 800 weights the ranks 6 and 3 of a layer save 160 and 120 more: steps at 1, 2, 0.5 · 4/3 and 4 · 4/3."""
    measured = SimpleNamespace(profile=lambda ranks: {"a": {3: 5.0, 6: 1.0}, "b": {3: 2.5, 6: 2.0}})
    monkeypatch.setattr("experiments.rivals.search.aafm.Sensitivity", lambda problem: measured)
    problem = losing(dict.fromkeys("ab", 1.0), ratio)
    assert AAFMSearch(ratios=(0.3, 0.6)).allocate(problem).plan == dict(zip("ab", plan, strict=True))


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_fastlrd_removes_the_component_of_least_similarity_for_its_cost(ratio):
    """One by one, with the similarity of the matrices themselves."""
    model = nn.Sequential(nn.Linear(24, 72), nn.Linear(40, 40)).double()
    model[1].weight.data *= torch.linspace(0, 1, 40) ** 4
    problem = plain_problem(model, bounds={"params": ratio})
    weights = {name: layer.weight.detach() for name, layer in problem.layers.items()}

    def fall(name, rank):
        pairs = (torch.mm(*problem.decompositions[name].truncate(each)).flatten() for each in (rank, rank - 1))
        high, low = (torch.cosine_similarity(each, weights[name].flatten(), dim=0).item() for each in pairs)
        return (high - low) / sum(weights[name].shape)

    plan = {name: problem.full_rank(name) for name in problem.layers}
    while not problem.fits(plan):
        plan[min(plan, key=lambda name: fall(name, plan[name]))] -= 1
    assert FastLRDSearch().allocate(problem).plan == plan


def test_memvit_gives_back_the_most_that_its_residual_can(chain):  # noqa: F811
    """Against reduced-rank regression on the inputs themselves: the principal components of what is fitted."""
    model, batches = chain
    residual = MemViTResidual(residual_share=0.3)  # rank 1 of the plan's 2
    plain, result = (compress_on_all(model, batches, layers=LAYERS, refit=each, **OPTIONS) for each in (None, residual))
    for number, name in enumerate(LAYERS):
        x = inputs_of(compressed_up_to(model, result, LAYERS[:number]), batches, name)
        weight, (left, right) = model.get_submodule(name).weight.detach(), plain.model.get_submodule(name).factors()
        main = left[:, :1] @ right[:1]
        lost = inputs_of(model, batches, name) @ weight.T - x @ main.T
        fitted = x @ torch.linalg.lstsq(x, lost).solution
        component = torch.linalg.svd(fitted, full_matrices=False).Vh[:1]
        weight = torch.matmul(*result.model.get_submodule(name).factors())
        torch.testing.assert_close(x @ weight.T, x @ main.T + fitted @ component.T @ component)
    rank_1 = {**OPTIONS, "ratio": 0.25}
    plain, result = (compress_on_all(model, batches, layers=LAYERS, refit=each, **rank_1) for each in (None, residual))
    torch.testing.assert_close(result.model(batches[0][0]), plain.model(batches[0][0]))  # nothing to give


def test_saes_svd_takes_the_mixture_that_keeps_most_of_its_outputs(chain):  # noqa: F811
    """Against principal components of what fits each mixture, on the inputs themselves."""
    model, batches = chain
    shares = (0.0, 0.3, 0.6, 0.9)
    result = compress_on_all(model, batches, layers=LAYERS, refit=SAESSVD(shares=shares), **OPTIONS)
    for number, name in enumerate(LAYERS):
        original = inputs_of(model, batches, name)
        x = inputs_of(compressed_up_to(model, result, LAYERS[:number]), batches, name)
        weight, rank = model.get_submodule(name).weight.detach(), result.plan[name]
        kept, outputs = [], []
        for share in shares:
            target = (share * original + (1 - share) * x) @ weight.T
            fitted = x @ torch.linalg.lstsq(x, target).solution
            s, components = torch.linalg.svd(fitted, full_matrices=False)[1:]
            kept.append((s[:rank].square().sum() / s.square().sum()).item())
            outputs.append(fitted @ components[:rank].T @ components[:rank])
        weight = torch.matmul(*result.model.get_submodule(name).factors())
        torch.testing.assert_close(x @ weight.T, outputs[kept.index(max(kept))])


def randomized(decomposition, rank, **options):
    """The weight at a rank."""
    left, right = RandomizedSVD(**options).randomized("layer", decomposition, rank).truncate(rank)
    return left @ right


def test_randomized_svd_is_as_far_off_as_pytorchs_of_the_whitened_weight():
    """Mean error of 100 draws, of either kind, with symmetric roots for those of the oracle; never below the exact."""
    torch.manual_seed(0)
    weight = torch.randn(9, 12, dtype=torch.float64)
    A, B = (x.T @ x for x in (torch.randn(20, size, dtype=torch.float64) for size in (12, 9)))
    decomposition, whitened = (
        decompose(weight, KroneckerFactors(A=A, B=B)),
        symmetric_root(B) @ weight @ symmetric_root(A),
    )
    for rank in (1, 7):
        ours, theirs = [], []
        for seed in range(100):
            found = randomized(decomposition, rank, seed=seed)
            ours.append(metric_error(weight - found, A, B))
            u, s, v = torch.svd_lowrank(whitened, q=rank)
            theirs.append((whitened - u * s @ v.T).square().sum())
        ours, theirs = torch.stack(ours), torch.stack(theirs)
        assert abs(ours.mean() - theirs.mean()) < 4 * ((ours.var() + theirs.var()) / 100).sqrt()  # standard errors
        assert min(ours) > discarded_energies(weight, A, B)[rank - 1] * (1 - 1e-9)  # rounding
    assert relative_error(randomized(decomposition, 9), weight) < 1e-12  # at full rank
    A[:, :3] = A[:3] = 0
    found = randomized(decompose(weight, KroneckerFactors(A=A, repair=None)), 9)
    assert found.isfinite().all() and not found[:, :3].any()  # directions that a root drops stay out
