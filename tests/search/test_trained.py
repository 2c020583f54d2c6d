"""Searches that train: what they learn, and that they go on as if they had not been interrupted."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import facts
from facts.modules.forms import FORMS
from facts.search import (
    ARSSearch,
    ComCatSearch,
    DobiSVDSearch,
    FLORASearch,
)
from facts.search.methods.ars import MaskedLayer
from tests.finetuning.setting import Reads, Watched, interrupt
from tests.networks import image_batches
from tests.search.problems import losing, make_problem


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


@pytest.mark.parametrize(
    ("search", "before", "after"),
    [
        (ARSSearch(num_epochs=6, learning_rate=0.01), 0, 0),
        (ComCatSearch(num_epochs=6, learning_rate=0.1), 0, 0),
        (DobiSVDSearch(num_epochs=6), 1, 2),  # a batch gives the loss's unit, and both make the weights
        (FLORASearch(num_epochs=6, population=5, num_generations=2), 0, 0),
    ],
    ids=["ars", "comcat", "dobi_svd", "flora"],
)
def test_training_goes_on_as_if_it_had_not_been_interrupted(search, before, after, tmp_path):
    """The third epoch ends early; of the six of 2 batches each, two need not run again, and then none."""
    expected = search.allocate(make_problem())

    def batches(reads):
        calibration = Watched(image_batches([8, 8]), reads)
        calibration.content_key = "images"
        return calibration

    with pytest.raises(KeyboardInterrupt):
        search.allocate(make_problem(calibration=batches(Reads(before + 6, interrupt)), cache=tmp_path))
    for count in (8, 0):
        reads = Reads()
        again = search.allocate(make_problem(calibration=batches(reads), cache=tmp_path))
        assert reads.count == before + count + after and again.saved_seconds > 0
        assert again.plan == expected.plan and again.solution == expected.solution
        for name, decomposition in (expected.decompositions or {}).items():
            assert again.decompositions[name].left.equal(decomposition.left)


def test_comcat_is_driven_to_the_budget():
    """With a loss that no choice changes, what a network costs above its budget alone decides what is probable."""
    problem = make_problem(bounds={"flops": 0.3}, loss=lambda outputs, targets: 0 * outputs.sum() + len(targets))
    solution = ComCatSearch(num_epochs=20, learning_rate=0.1).allocate(problem).solution
    untrained = sum(math.log(len(ranks) + 1) for ranks in problem.ranks_of_ratios(ComCatSearch().ratios).values())
    assert solution.error < 0.75 * untrained


def trained_logits(problem, search, monkeypatch):
    """The logits of each layer's components up to the full rank, without a solver."""
    errors = {}

    def solve(self, problem, given):
        errors.update(given)
        return dict.fromkeys(problem.layers), None

    monkeypatch.setattr(ARSSearch, "solve", solve)
    search.allocate(problem)
    sums = {name: [-each[rank] for rank in sorted(each.keys() - {None})] for name, each in errors.items()}
    return {name: np.diff(each, prepend=0) for name, each in sums.items()}


@pytest.mark.parametrize("form", FORMS)
def test_ars_trains_aligned_masks_to_the_budget(form, monkeypatch):
    """To 10 %, before the solver, with a loss that no mask changes; without the alignment, some masks have gaps."""
    fields = {"form": FORMS[form], "bounds": {"flops": 0.6, "params": 0.6}}
    fields["loss"] = lambda outputs, targets: 0 * outputs.sum() + len(targets)
    problem, options = make_problem(**fields), {"num_epochs": 100, "learning_rate": 0.003}
    logits = trained_logits(problem, ARSSearch(**options), monkeypatch)
    kept = {name: each > 0 for name, each in logits.items()}
    assert all(mask.tolist() == sorted(mask, reverse=True) for mask in kept.values())
    spent = problem.spent({name: max(1, int(mask.sum())) for name, mask in kept.items()})
    assert all(cost <= 1.1 * budget for cost, budget in zip(spent, problem.budget, strict=True))
    assert any(mask.sum() > 1 for mask in kept.values())
    logits = trained_logits(problem, ARSSearch(**options, alignment_weight=0), monkeypatch)
    assert any(each.tolist() != sorted(each, reverse=True) for each in logits.values())


def test_ars_keeps_the_components_of_the_largest_logits_that_fit(monkeypatch):
    """Against all plans of two layers: sums of logits of the leading components, or of all for a dense layer."""
    logits = {"a": torch.linspace(2, -4, 20), "b": torch.linspace(1, -3, 20)}
    monkeypatch.setattr("facts.search.methods.ars.seeded_hypernetwork", lambda widths, seed: Given(logits.values()))
    problem = losing(dict.fromkeys(logits, 1.0), ratio=0.4)
    monkeypatch.setattr(ARSSearch, "train", lambda *arguments: 0.0)
    plan = ARSSearch(offset=1.0).allocate(problem).plan
    sums = {name: (each + 1).double().cumsum(0) for name, each in logits.items()}
    plans = [dict(zip("ab", ranks, strict=True)) for ranks in itertools.product([*range(1, 11), None], repeat=2)]
    totals = [
        sum(sums[name][(rank or 20) - 1].item() for name, rank in each.items()) for each in plans if problem.fits(each)
    ]
    total = sum(sums[name][(rank or 20) - 1].item() for name, rank in plan.items())
    assert problem.fits(plan) and total == pytest.approx(max(totals))


class Given(nn.Module):
    """Stands for a hypernetwork."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.ParameterList(logits)

    def forward(self):
        return [*self.logits]


@pytest.mark.parametrize("form", FORMS)
def test_an_aligned_mask_costs_what_its_rank_costs(form):
    """And is not misaligned; a mask whose only one is the last component is so by the first and the last."""
    problem = make_problem(bounds={"flops": 0.6, "params": 0.6}, form=FORMS[form])
    layer = MaskedLayer(problem, "windows")
    for rank in range(1, 11):
        layer.mask = (torch.arange(10) < rank).float()
        assert layer.cost().tolist() == pytest.approx(problem.cost("windows", rank))
        assert layer.misalignment() == 0
    layer.mask = (torch.arange(10) == 9).float()
    energies = problem.decompositions["windows"].energies
    assert layer.misalignment().item() == pytest.approx((1 + energies[9] / energies[0]).item())
