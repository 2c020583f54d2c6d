"""Labels that the network draws itself: the true Fisher."""

from functools import partial

import pytest
import torch

import facts
from facts.cache import name_of
from facts.layers import select_layers
from facts.losses import SampledLabels, summed_cross_entropy
from facts.moments import GradGram, collect_moments
from facts.search import ComCatSearch
from tests.networks import image_batches, make_model, relative_error

SAMPLED = SampledLabels(summed_cross_entropy, seed=0)


def grams(model, batches, loss):
    moments = collect_moments(model, select_layers(model), batches, [GradGram()], loss=loss)
    return {name: values[GradGram()][0] for name, values in moments.items()}


def test_labels_follow_the_networks_probabilities():
    """Of 40,000 draws a share is known to 0.0025 at most: four times that."""
    logits = torch.tensor([0.0, 1.0, -2.0]).expand(40000, 3)
    seen = []
    SampledLabels(lambda outputs, labels: seen.append(labels))(logits, None)
    shares = torch.bincount(seen[0], minlength=3) / 40000
    torch.testing.assert_close(shares, logits[0].softmax(dim=0), rtol=0, atol=0.01)


def test_the_given_labels_are_of_no_matter_and_every_pass_draws_the_same():
    model, batches = make_model(), image_batches([4, 3])
    others = [(images, 3 - labels) for images, labels in batches]
    first, second = grams(model, batches, SAMPLED), grams(model, others, SAMPLED)
    assert all(first[name].equal(second[name]) for name in first)
    given = grams(model, batches, summed_cross_entropy)
    assert all(relative_error(given[name], first[name]) > 1e-3 for name in first)
    reseeded = grams(model, batches, SampledLabels(summed_cross_entropy, seed=1))
    assert any(not first[name].equal(reseeded[name]) for name in first)


def test_many_draws_make_the_true_fisher():
    """E_y~p[g gᵀ] of the classifier's input is known exactly; 4,000 repetitions of one image, 5 % being ample."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.Linear(12, 12)).double()
    inputs = torch.randn(1, 5, dtype=torch.float64)
    probabilities = model(inputs)[0].softmax(dim=0)
    fisher = torch.diag(probabilities) - torch.outer(probabilities, probabilities)  # of the logits
    found = grams(model, [(inputs.expand(4000, 5), None)], SAMPLED)["1"] / 4000
    assert relative_error(found, fisher) < 0.05


def test_the_cache_tells_them_from_given_labels(tmp_path):
    model, batches = make_model(), image_batches([5])
    results = [
        facts.compress(model, batches, loss=loss, cache=tmp_path).model(batches[0][0])
        for loss in (summed_cross_entropy, SAMPLED, SampledLabels(summed_cross_entropy, seed=1), SAMPLED)
    ]
    assert results[1].equal(results[3])
    assert not any(results[a].allclose(results[b]) for a, b in ((0, 1), (1, 2), (0, 2)))
    assert name_of(SAMPLED, "loss") != name_of(summed_cross_entropy, "loss")


def test_outputs_that_are_no_logits_are_refused():
    for outputs in ({"logits": torch.zeros(2, 3)}, torch.zeros(3), torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="only be drawn from class logits"):
            SAMPLED(outputs, None)


@pytest.mark.parametrize("loss", [torch.nn.CrossEntropyLoss(reduction="sum"), partial(summed_cross_entropy)])
def test_losses_without_a_name_can_be_sampled_but_not_cached(loss, tmp_path):
    model, batches = make_model(), image_batches([5])
    named, unnamed = (facts.compress(model, batches, loss=SampledLabels(each)) for each in (summed_cross_entropy, loss))
    assert named.model(batches[0][0]).equal(unnamed.model(batches[0][0]))
    facts.compress(model, batches, search="cors_fisher", loss=loss)
    with pytest.raises(ValueError, match="cache= needs loss= to have a name"):
        facts.compress(model, batches, loss=SampledLabels(loss), cache=tmp_path)


def test_searches_go_by_the_given_labels():
    """ComCat trains on the loss: with the labels of the data, whatever the factors come from."""
    model, batches = make_model(), image_batches([6])
    seen = []

    def loss(outputs, labels):
        seen.append(labels)
        return summed_cross_entropy(outputs, labels)

    facts.compress(model, batches, search=ComCatSearch(num_epochs=2), loss=SampledLabels(loss))
    assert not seen[0].equal(batches[0][1])  # the data pass
    assert all(labels.equal(batches[0][1]) for labels in seen[1:]) and len(seen) > 1
