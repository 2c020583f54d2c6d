"""Searches that train: they go on after an interruption, and move ranks to the layer that matters."""

import pytest
import torch
from torch import nn

import facts
from experiments.baselines.dobi_svd import DobiSVDSearch
from experiments.baselines.flora import FLORASearch
from facts.search import ComCatSearch
from tests.finetuning.setting import Reads, Watched, interrupt
from tests.networks import image_batches
from tests.search.problems import make_problem


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
