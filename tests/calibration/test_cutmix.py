"""Calibration on images mixed by CutMix."""

import random

import numpy as np
import pytest
import torch

import facts
from facts.utils.cache import calibration_key
from tests.networks import KeyedBatches, Runs, image_batches, make_model

SIZES = [5, 4, 1]  # an odd batch, and an image without another
SHARE = 1e-6  # float32 holds shares of pixels to 6e-8 of themselves


@pytest.fixture
def batches():
    return image_batches(SIZES)


def same(first, second):
    pairs = zip(first, second, strict=True)
    return all(one.equal(other) for batch, again in pairs for one, other in zip(batch, again, strict=True))


def masks_of(batches, mixed):
    """Where each image shows the one before it, `[N, H, W]` a batch. All other pixels are its own."""
    for (images, _), (seen, _) in zip(batches, mixed, strict=True):
        own, other = (seen == images).all(dim=1), (seen == images.roll(1, dims=0)).all(dim=1)
        assert (own | other).all()
        yield ~own


def test_images_have_a_rectangle_of_the_one_before_and_labels_are_shares_of_pixels(batches):
    mixed = list(facts.CutMix(batches, 4, seed=1))
    masks = list(masks_of(batches, mixed))
    for (_, labels), (_, targets), of_batch in zip(batches, mixed, masks, strict=True):
        expected = torch.zeros(len(labels), 4, dtype=torch.float64)
        for k, mask in enumerate(of_batch):
            rows, columns = mask.any(dim=1), mask.any(dim=0)
            assert mask.equal(rows[:, None] & columns)
            assert all(side.int().diff().abs().sum() <= 2 for side in (rows, columns))  # without gaps
            share = float(mask.double().mean())
            expected[k, labels[k]] += 1 - share
            expected[k, labels[k - 1]] += share
        torch.testing.assert_close(targets.double(), expected, rtol=0, atol=SHARE)
    areas = [int(of_batch[0].sum()) for of_batch in masks]
    assert 0 != areas[0] != areas[1] != areas[2] == 0  # a rectangle for each batch; a single image has none


def test_every_pass_is_the_same_and_nothing_else_changes(batches):
    mixed, before = facts.CutMix(batches, 4), [images.clone() for images, _ in batches]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = list(mixed)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.get_rng_state().equal(states[2])
    assert all(images.equal(old) for (images, _), old in zip(batches, before, strict=True))
    assert same(mixed, first)
    assert not same(facts.CutMix(batches, 4, seed=1), first)


def test_searches_and_drawn_labels_see_the_mixed_images(batches):
    """With nothing held out, since that is done before images are mixed."""
    images = [images for images, _ in batches]
    for data in (batches, images):
        networks = []
        for each in (facts.CutMix(data, 4), list(facts.CutMix(data, 4))):
            result = facts.compress(facts.prepare(make_model(), each, held_out=()), search="cors")
            networks.append(result.model.state_dict())
        assert all(tensor.equal(networks[1][name]) for name, tensor in networks[0].items())
    assert all(targets is None for _, targets in facts.CutMix(images, 4))


def test_the_cache_distinguishes_mixtures(batches):
    for kind in (list, KeyedBatches):
        data = kind(batches)
        others = ({"num_classes": 5}, {"alpha": 0.3}, {"seed": 1})
        keys = [calibration_key(facts.CutMix(data, **{"num_classes": 4} | fields)) for fields in ({}, {}, *others)]
        assert len({*keys, calibration_key(data)}) == 5 and keys[0] == keys[1]


IMAGES, LABELS = image_batches([4])[0]
UNFIT = {
    "soft targets": ([(IMAGES, torch.eye(4))], r"with class indices \[N\], got float64 .* with float32 \[4, 4\]$"),
    "no data": (None, "CutMix mixes the images of data, and got none: give batches of images$"),
    "tokens": ([(LABELS[None], LABELS[None])], r"got int64 \[1, 4\] with int64 \[1, 4\]$"),
    "other classes": ([(IMAGES, LABELS + 4)], "labels from 4 to 5 do not fit num_classes=4: give the number of the"),
    "batches of one": ([(IMAGES[:1], LABELS[:1])] * 4, "the first has only one: give batches of two or more$"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_mixed_is_refused_before_any_work(case):
    data, message = UNFIT[case]
    model = make_model()
    runs = Runs(model.grid)
    with pytest.raises(ValueError, match=message) as caught:
        facts.compress(model, facts.CutMix(data, 4))
    assert "\n" not in str(caught.value) and runs.number == 0
