"""The digits: streams of views of a hundred images, each part of the task with its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.train_mini import mini_recipe
from facts.tasks import ColouredDigits, Digits
from facts.tasks.classification.base import balanced
from facts.tasks.classification.digit_stream import NUM_CLASSES, draw_digits, move

BACKGROUND = (0 - 4.9) / 6  # black, normalised


@pytest.fixture(scope="module")
def network():
    return mini_recipe("deit_b", weights="random").build()


def together(batches):
    """All images of the batches as rows, and their labels."""
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return images.flatten(1), labels


def test_a_stream_is_the_same_each_time_and_another_name_is_another_stream():
    (images, labels), again = draw_digits("one", 300), draw_digits("one", 300)
    assert images.equal(again[0]) and labels.equal(again[1])
    other_images, other_labels = draw_digits("two", 300)
    assert not images.equal(other_images) and not labels.equal(other_labels)


@pytest.mark.parametrize("count", [1, 200, 201, 399])
def test_a_shorter_part_is_the_beginning_of_a_longer_one(count):
    (images, labels), (more_images, more_labels) = draw_digits("one", count), draw_digits("one", 500)
    assert images.shape == (count, 1, 16, 16) and labels.shape == (count,)
    assert images.equal(more_images[:count]) and labels.equal(more_labels[:count])


def test_every_class_comes_twice_in_every_block_of_200_in_a_new_order():
    _, labels = draw_digits("one", 600)
    blocks = labels.split(200)
    assert all(torch.bincount(block).tolist() == [2] * NUM_CLASSES for block in blocks)
    assert not blocks[0].equal(blocks[1]) and not blocks[1].equal(blocks[2])


def test_images_are_normalised_and_lie_on_a_black_ground():
    images, _ = draw_digits("one", 2000)
    assert abs(images.mean()) < 0.1
    assert abs(images.std() - 1) < 0.1
    corners = images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.median() == pytest.approx(BACKGROUND, abs=0.05)
    assert (corners.median() - images[:, :, 8, 8].mean()).abs() > 0.5  # ink is in the middle


@pytest.mark.parametrize("side", [32, 64])
def test_a_larger_side_shows_the_same_images(side):
    (small, labels), (large, large_labels) = draw_digits("one", 200), draw_digits("one", 200, side)
    assert large.shape == (200, 1, side, side) and large_labels.equal(labels)
    reduced = F.adaptive_avg_pool2d(large, 16)
    nearest = torch.cdist(reduced.flatten(1), small.flatten(1)).argmin(dim=1)
    assert nearest.tolist() == list(range(200))


def test_labels_tell_whose_view_an_image_is():
    """The mean view of a class, from one stream, is nearest to most of its views in another: chance is 1 %."""
    (images, labels), (others, other_labels) = draw_digits("one", 4000), draw_digits("two", 1000)
    means = torch.stack([images[labels == number].mean(dim=0) for number in range(NUM_CLASSES)])
    found = torch.cdist(others.flatten(1), means.flatten(1)).argmin(dim=1)
    assert (found == other_labels).float().mean() > 0.3


def test_moving_keeps_the_ground_and_moves_each_image_its_own_way():
    images = torch.full((3, 1, 16, 16), BACKGROUND)
    images[:, :, 6:10, 6:10] = 1.0
    still = move(images, 0, 0, 0, torch.Generator().manual_seed(0))
    assert torch.allclose(still, images, atol=1e-6)
    moved = move(images, 0.2, 0.1, 0.1, torch.Generator().manual_seed(0))
    assert moved.min() == pytest.approx(BACKGROUND, abs=1e-6) and moved[:, :, 0, 0].allclose(images[:, :, 0, 0])
    assert not moved[0].allclose(moved[1], atol=0.1) and not moved[0].allclose(images[0], atol=0.1)
    assert moved.equal(move(images, 0.2, 0.1, 0.1, torch.Generator().manual_seed(0)))


def test_no_image_is_in_two_parts_of_the_task(network):
    """Noise alone sets two views of a digit about 0.6 * (2 * 256) ** 0.5 = 13.6 apart."""
    task = Digits(num_training=1000)
    calls = (task.calibration, task.sensitivity, task.evaluation)
    parts = [*(call(network) for call in calls), task.training(network, 0), task.training(network, 1)]
    images, _ = together([batch for part in parts for batch in part])
    assert len(images) == 4096 + 128 + 3000 + 1000 + 1000
    distances = torch.cdist(images, images).fill_diagonal_(torch.inf)
    assert distances.min() > 5


def test_the_parts_are_as_large_as_asked(network):
    task = Digits(num_calibration=300, num_sensitivity=40, num_training=130, batch_size=64)
    assert [len(labels) for _, labels in task.calibration(network)] == [64, 64, 64, 64, 44]
    assert [len(labels) for _, labels in task.sensitivity(network)] == [40]
    assert [len(labels) for _, labels in task.training(network, 0)] == [64, 64, 2]
    assert sum(len(labels) for _, labels in task.evaluation(network)) == task.num_evaluation == 3000


def test_a_smaller_calibration_set_is_the_first_part_of_a_larger_one(network):
    small, _ = together(Digits(num_calibration=64).calibration(network))
    large, _ = together(Digits().calibration(network))
    assert small.equal(large[:64])


def test_the_content_depends_on_the_side_that_the_network_sees(network):
    larger = nn.Identity()
    larger.pretrained_cfg = {"input_size": (1, 32, 32)}
    assert Digits().content_key(network) != Digits().content_key(larger)
    assert Digits().content_key(network) == Digits().content_key(network) != Digits(batch_size=7).content_key(network)


def test_analyses_see_every_class_as_often(network):
    parts = [together(batches) for batches in Digits().analysis(network)]
    counts = [torch.bincount(labels).tolist() for _, labels in parts]
    assert counts == [[16] * NUM_CLASSES, [8] * NUM_CLASSES]
    (first, _), (second, _) = parts
    assert torch.cdist(first, second).min() > 5
    tests, _ = together(Digits().evaluation(network))
    assert torch.cdist(torch.cat([first, second]), tests).min(dim=1).values.max() < 0.1  # all are test images


def test_balanced_parts_are_disjoint_and_shuffled():
    labels = torch.arange(60) % 3
    first, second = balanced(labels, (4, 2))
    assert len({*first.tolist(), *second.tolist()}) == 18
    assert torch.bincount(labels[first]).tolist() == [4] * 3 and torch.bincount(labels[second]).tolist() == [2] * 3
    assert labels[first].diff().any() and not labels[first].equal(labels[first].sort().values)
    assert not first.equal(balanced(labels, (4, 2), seed=1)[0])


def test_too_few_images_of_a_class_are_refused(network):
    with pytest.raises(ValueError, match="needs 31 evaluation images of every class; one has 30"):
        Digits(num_factors_per_class=23).analysis(network)


def test_every_epoch_of_training_has_views_of_its_own_by_epoch_and_seed(network):
    epochs = [Digits().training(network, *numbers) for numbers in ((0,), (0,), (1,), (0, 1))]
    (first, labels), (again, _), *others = map(together, epochs)
    assert len(first) == 4096 and torch.bincount(labels).min() >= 40
    assert first.equal(again)
    assert all(torch.cdist(first, other).min() > 5 for other, _ in others)


def test_coloured_digits_are_divided_without_overlap():
    network = torch.nn.Identity()
    network.pretrained_cfg = {"input_size": (3, 32, 32)}
    task = ColouredDigits(num_calibration=1000)
    calibration, sensitivity, test = (
        torch.cat([images for images, _ in batches]).flatten(1)
        for batches in (task.calibration(network), task.sensitivity(network), task.evaluation(network))
    )
    assert [len(part) for part in (calibration, sensitivity, test)] == [1000, 128, 599]
    assert torch.cdist(sensitivity, calibration).min() > 0 and torch.cdist(test, calibration).min() > 0
    first, second = (torch.cat([labels for _, labels in task.training(network, epoch)]) for epoch in (0, 1))
    assert first.bincount().equal(second.bincount()) and not first.equal(second)
