"""Labels that the network draws itself: the true Fisher."""

import pytest
import torch
import torch.nn.functional as F

import facts
from facts.moments import GradGram, collect_moments
from facts.moments.losses import SampledLabels, summed_cross_entropy
from facts.parts.layers import select_layers
from tests.networks import image_batches, make_model, relative_error

SAMPLED = SampledLabels(summed_cross_entropy, seed=0)


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
    monkeypatch.setattr(
        torch, "multinomial", lambda rows, *rest, **own: sizes.append(len(rows)) or draw(rows, *rest, **own)
    )
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


def test_the_cache_tells_them_from_given_labels(tmp_path):
    execution = facts.Execution(cache=tmp_path)
    first, second, third, again = (
        facts.prepare(make_model(), image_batches([5]), loss=loss, execution=execution).moments([GradGram()])
        for loss in (summed_cross_entropy, SAMPLED, SampledLabels(summed_cross_entropy, seed=1), SAMPLED)
    )
    grams = [each["tokens"][GradGram()][0] for each in (first, second, third)]
    assert again["tokens"][GradGram()][0].equal(grams[1])
    assert not any(grams[a].allclose(grams[b]) for a, b in ((0, 1), (1, 2), (0, 2)))


LOGITS = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))


def test_cross_entropy_fits_every_kind_of_label():
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
        (LOGITS, torch.zeros(3, dtype=torch.int64), r"float32 \[4, 10\] and int64 \[3\]"),
        ({"out": LOGITS}, None, r"dict of out: float32 \[4, 10\] and NoneType"),
    ],
)
def test_outputs_and_targets_that_it_does_not_fit(outputs, targets, what):
    with pytest.raises(ValueError, match=rf"from outputs and targets that are {what}: .*loss="):
        summed_cross_entropy(outputs, targets)


@pytest.mark.parametrize(("label", "range"), [(10, "0 to 10"), (-1, "-1 to 9")])
def test_labels_of_other_classes(label, range):
    with pytest.raises(ValueError, match=rf"labels from {range} do not fit a network of 10 classes: .* 0 \.\. 9"):
        summed_cross_entropy(LOGITS, torch.tensor([label, 9, 0, 0]))
