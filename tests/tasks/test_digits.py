"""The digits' parts: what gives factors, what searches compare outputs on, and what is judged by."""

import pytest
import torch
from pydantic import ValidationError

from experiments.train_mini import mini_recipe
from facts.tasks import Digits
from facts.tasks.classification.base import balanced
from facts.tasks.classification.digits import load_images


@pytest.fixture(scope="module")
def network():
    return mini_recipe("deit_b").build()


def images_of(batches):
    return torch.cat([images for images, _ in batches]).flatten(1)


def test_calibration_and_sensitivity_share_no_image(network):
    calibration, sensitivity = images_of(Digits().calibration(network)), images_of(Digits().sensitivity(network))
    assert len(calibration) == 1024 and len(sensitivity) == 128
    assert torch.cdist(sensitivity, calibration).min() > 0


def test_a_smaller_calibration_set_is_the_first_part_of_a_larger_one(network):
    small = images_of(Digits(num_calibration=64).calibration(network))
    assert small.equal(images_of(Digits().calibration(network))[:64])


def test_more_images_than_there_are_is_refused():
    with pytest.raises(ValidationError, match=r"may be 1198, .* got 1100 \+ 128"):
        Digits(num_calibration=1100)


def test_analyses_see_every_digit_as_often(network):
    parts = Digits().analysis(network)
    counts = [torch.bincount(torch.cat([labels for _, labels in batches])) for batches in parts]
    assert [set(count.tolist()) for count in counts] == [{32}, {16}]
    first, second = map(images_of, parts)
    assert torch.cdist(first, second).min() > 0
    calibration = images_of(Digits().calibration(network))
    assert torch.cdist(torch.cat([first, second]), calibration).min() > 0


def test_balanced_parts_are_disjoint_and_shuffled():
    labels = torch.arange(60) % 3
    first, second = balanced(labels, (4, 2))
    assert len({*first.tolist(), *second.tolist()}) == 18
    assert torch.bincount(labels[first]).tolist() == [4] * 3 and torch.bincount(labels[second]).tolist() == [2] * 3
    assert labels[first].diff().any() and not labels[first].equal(labels[first].sort().values)
    assert not first.equal(balanced(labels, (4, 2), seed=1)[0])


def test_too_few_images_of_a_class_are_refused(network):
    with pytest.raises(ValueError, match="needs 56 evaluation images of every class; one has 51"):
        Digits(num_factors_per_class=40).analysis(network)


def test_an_epoch_of_training_shows_every_digit_once_in_an_order_of_its_own(network):
    epochs = [Digits().training(network, *numbers) for numbers in ((0,), (0,), (1,), (0, 1))]
    first, again, second, other_seed = map(images_of, epochs)
    everything, _ = load_images("train", 16)
    assert first.unique(dim=0).equal(everything.flatten(1).unique(dim=0)) and len(first) == len(everything)
    assert first.equal(again) and not first.equal(second) and not first.equal(other_seed)
