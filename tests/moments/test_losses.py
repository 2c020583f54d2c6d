"""Labels that the network draws itself: the true Fisher."""

import torch
import torch.nn.functional as F

from facts.moments import GradGram, collect_moments
from facts.moments.losses import SampledLabels, summed_cross_entropy
from facts.parts.layers import select_layers
from tests.networks import image_batches, make_model, relative_error
from tests.refusals import refused

SAMPLED = SampledLabels(summed_cross_entropy, seed=0)
LOGITS = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))


def grams(model, batches, loss):
    moments = collect_moments(model, select_layers(model).layers, batches, [GradGram()], loss=loss)
    return {name: values[GradGram()][0] for name, values in moments.items()}


def test_labels_follow_the_networks_probabilities():
    """A share of 40,000 draws is known to 0.0025 at most: four times that."""
    logits = torch.tensor([0.0, 1.0, -2.0]).expand(40000, 3)
    seen = []
    SampledLabels(lambda outputs, labels: seen.append(labels))(logits, None)
    shares = torch.bincount(seen[0], minlength=3) / 40000
    torch.testing.assert_close(shares, logits[0].softmax(dim=0), rtol=0, atol=0.01)


def test_labels_are_drawn_in_chunks(monkeypatch):
    monkeypatch.setattr("facts.moments.losses.CHUNK", 50)
    logits, sizes, seen = torch.full((2, 30, 7), -1000.0), [], []
    logits.scatter_(2, (certain := torch.arange(60).view(2, 30) % 7)[..., None], 0.0)
    draw = torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda rows, *a, **own: sizes.append(len(rows)) or draw(rows, *a, **own))
    SampledLabels(lambda outputs, labels: seen.append(labels))(logits, None)
    assert seen[0].equal(certain) and sizes == [7] * 8 + [4]


def test_the_given_labels_are_of_no_matter_and_every_pass_draws_the_same():
    model, batches = make_model(), image_batches([4, 3])
    others = [(images, 3 - labels) for images, labels in batches]
    first, second = grams(model, batches, SAMPLED), grams(model, others, SAMPLED)
    assert all(first[name].equal(second[name]) for name in first)
    given = grams(model, batches, summed_cross_entropy)
    assert all(relative_error(given[name], first[name]) > 1e-3 for name in first)
    reseeded = grams(model, batches, SampledLabels(summed_cross_entropy, seed=1))
    assert any(not first[name].equal(reseeded[name]) for name in first)


def test_cross_entropy_fits_every_kind_of_label():
    labels = torch.tensor([1, 2, 9, 0])
    expected = F.cross_entropy(LOGITS, labels, reduction="sum")
    assert summed_cross_entropy(LOGITS, labels).equal(expected)
    assert summed_cross_entropy(LOGITS, labels.int()).equal(expected)
    assert summed_cross_entropy(LOGITS[None], labels[None]).equal(expected)
    torch.testing.assert_close(summed_cross_entropy(LOGITS, F.one_hot(labels, 10).float()), expected)
    without_one = F.cross_entropy(LOGITS[:3], labels[:3], reduction="sum")
    torch.testing.assert_close(summed_cross_entropy(LOGITS, torch.tensor([1, 2, 9, -100])), without_one)


test_outputs_and_targets_that_it_does_not_fit = refused(
    (LOGITS, LOGITS, r"from outputs and targets that are float32 \[4, 10\] and float32 \[4, 10\]: .*loss="),
    ({"out": LOGITS}, None, r"from outputs and targets that are dict of out: float32 \[4, 10\] and NoneType: .*loss="),
    (LOGITS, torch.tensor([10, 9, 0, 0]), r"labels from 0 to 10 do not fit a network of 10 classes: .* 0 \.\. 9"),
    (LOGITS, torch.tensor([-1, 9, 0, 0]), r"labels from -1 to 9 do not fit a network of 10 classes: .* 0 \.\. 9"),
    by=summed_cross_entropy,
)
