"""Labels that the network draws itself: the true Fisher."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import facts
from facts.calibration.selection import select_layers
from facts.moments import GradGram, collect_moments
from facts.moments.losses import SampledLabels, kl_divergence, squared_error, summed_cross_entropy
from facts.search import ComCatSearch
from facts.utils.cache import name_of
from tests.networks import image_batches, make_model, relative_error

SAMPLED = SampledLabels(summed_cross_entropy, seed=0)


def grams(model, batches, loss):
    moments = collect_moments(model, select_layers(model).layers, batches, [GradGram()], loss=loss)
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
        facts.compress(model, batches, loss=loss, execution=facts.Execution(cache=tmp_path)).model(batches[0][0])
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
        facts.compress(model, batches, loss=SampledLabels(loss), execution=facts.Execution(cache=tmp_path))


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


LOGITS = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))


class TestCrossEntropyFits:
    def test_every_kind_of_label(self):
        labels = torch.tensor([1, 2, 9, 0])
        expected = F.cross_entropy(LOGITS, labels, reduction="sum")
        assert summed_cross_entropy(LOGITS, labels).equal(expected)
        assert summed_cross_entropy(LOGITS, labels.int()).equal(expected)
        assert summed_cross_entropy(LOGITS[None], labels[None]).equal(expected)
        torch.testing.assert_close(summed_cross_entropy(LOGITS, F.one_hot(labels, 10).float()), expected)
        without_one = F.cross_entropy(LOGITS[:3], labels[:3], reduction="sum")
        torch.testing.assert_close(summed_cross_entropy(LOGITS, torch.tensor([1, 2, 9, -100])), without_one)

    @pytest.mark.parametrize(
        ("outputs", "targets", "what"),
        [
            (LOGITS, LOGITS, r"float32 \[4, 10\] and float32 \[4, 10\]"),  # a regression
            (LOGITS, LOGITS.softmax(dim=1)[:, :5], r"float32 \[4, 10\] and float32 \[4, 5\]"),
            (LOGITS, torch.zeros(3, dtype=torch.int64), r"float32 \[4, 10\] and int64 \[3\]"),
            (LOGITS[:, 0], torch.zeros(4, dtype=torch.int64), r"float32 \[4\] and int64 \[4\]"),
            ({"out": LOGITS}, torch.zeros(4, dtype=torch.int64), r"dict and int64 \[4\]"),
            (LOGITS, None, r"float32 \[4, 10\] and NoneType"),
        ],
        ids=["regression", "probabilities", "samples", "no classes", "dict", "no labels"],
    )
    def test_what_it_does_not_fit(self, outputs, targets, what):
        with pytest.raises(
            ValueError, match=rf"no loss can be inferred from outputs and targets that are {what}: .*loss="
        ):
            summed_cross_entropy(outputs, targets)

    @pytest.mark.parametrize(("label", "range"), [(10, "0 to 10"), (-1, "-1 to 9")])
    def test_labels_of_other_classes(self, label, range):
        with pytest.raises(ValueError, match=rf"labels from {range} do not fit a network of 10 classes: .* 0 \.\. 9"):
            summed_cross_entropy(LOGITS, torch.tensor([label, 9, 0, 0]))


def test_a_regression_with_its_own_loss():
    """Its outputs are compared by their squared error, since they are no logits."""
    model, images = make_model(), image_batches([6])[0][0]
    batches = [(images, torch.randn(6, 4, dtype=torch.float64))]
    with pytest.raises(ValueError, match="no loss can be inferred"):
        facts.compress(model, batches)
    result = facts.compress(model, batches, loss=squared, search="cors", ratio=0.7)
    expected = facts.compress(model, batches, loss=squared, search="cors", ratio=0.7, output_error=squared_error)
    by_divergence = facts.compress(model, batches, loss=squared, search="cors", ratio=0.7, output_error=kl_divergence)
    assert result.summary.profile == expected.summary.profile
    assert result.summary.profile != by_divergence.summary.profile


def squared(outputs, targets):
    return (outputs - targets).square().sum()
