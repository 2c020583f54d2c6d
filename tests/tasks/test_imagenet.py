"""ImageNet's splits, transforms and keys, on made-up pictures in class folders."""

import random
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from facts.tasks.classification.imagenet_files import synsets


@pytest.fixture
def root(roots):
    return roots["folders"]


def seen(batches) -> list[bytes]:
    """The pixels of every image: no two pictures are the same."""
    return [image.numpy().tobytes() for images, _ in batches for image in images]


def test_calibration_is_the_part_of_one_shuffle_that_searches_leave(root, network, task):
    chosen = seen(task(root).calibration(network))
    assert len(chosen) == len(set(chosen)) == 24
    assert chosen == seen(task(root).calibration(network))
    assert chosen[1:] == seen(task(root, num_sensitivity=11, num_calibration=23).calibration(network))
    assert chosen != seen(task(root, seed=1).calibration(network))


def test_searches_compare_outputs_on_images_that_give_no_factors(root, network, task):
    imagenet = task(root, augmentation="train")
    kept, chosen = seen(imagenet.sensitivity(network)), seen(task(root).calibration(network))
    assert len(kept) == 10 and len({*kept, *chosen}) == 34
    assert kept == seen(imagenet.sensitivity(network))  # never augmented, which would be random
    assert imagenet.sensitivity(network).content_key != imagenet.calibration(network).content_key


def test_the_chosen_images_are_told_by_index_and_name(root, network, task, files):
    imagenet = task(root)
    in_order = sorted(files["train"])
    shuffled = torch.randperm(3000, generator=torch.Generator().manual_seed(0)).tolist()
    chosen = imagenet.chosen_images()
    for use, indices in (("sensitivity", shuffled[:10]), ("calibration", shuffled[10:34])):
        names = [in_order[index] for index in indices]
        assert chosen[use] == {"indices": indices, "names": names}
        labels = torch.cat([labels for _, labels in getattr(imagenet, use)(network)])
        assert labels.tolist() == [synsets().index(name.split("/")[0]) for name in names]


def first_validation_image(files) -> Image.Image:
    return Image.open(BytesIO(files["val"][min(files["val"])]))


def test_the_paper_resizes_a_little_larger_and_crops(root, network, task, files):
    images, labels = next(iter(task(root).evaluation(network)))
    resized = first_validation_image(files).resize((36, 36), Image.Resampling.BICUBIC).crop((2, 2, 34, 34))
    assert images.shape == (8, 3, 32, 32) and labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(images[0], normalised(resized, network))


def test_timm_prepares_images_as_the_checkpoint_asks(root, network, task, files):
    images, _ = next(iter(task(root, transform="timm").evaluation(network)))
    resized = first_validation_image(files).resize((32, 32), Image.Resampling.BILINEAR)
    torch.testing.assert_close(images[0], normalised(resized, network))


def normalised(image: Image.Image, network) -> torch.Tensor:
    mean, std = (torch.tensor(network.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - mean) / std


@pytest.mark.parametrize("augmentation", ["train", "train_cutmix"])
def test_augmented_calibration_changes_the_key_and_feeds_the_loss(root, network, task, augmentation):
    plain, augmented = (task(root, augmentation=name).calibration(network) for name in ("none", augmentation))
    assert plain.content_key != augmented.content_key
    images, targets = next(iter(augmented))
    assert targets.shape == ((8,) if augmentation == "train" else (8, 1000))
    assert task(root).loss(network(images), targets).isfinite()


def test_cutmix_mixes_odd_batches_without_smoothing_labels(root, network, task):
    batches = task(root, augmentation="train_cutmix", num_calibration=11).calibration(network)
    targets = [targets for _, targets in batches]
    assert [len(part) for part in targets] == [8, 3]
    assert (torch.cat(targets) > 0).sum(dim=1).max() == 2


def test_the_key_of_the_calibration_images_is_theirs_alone(root, network, task):
    """So that moments are found again when other sizes change."""
    key = task(root).calibration(network).content_key
    assert task(root, num_factors_per_class=1).calibration(network).content_key == key
    for change in ({"num_calibration": 7}, {"batch_size": 2}, {"transform": "timm"}, {"seed": 1}):
        assert task(root, **change).calibration(network).content_key != key


def test_the_key_of_the_task_follows_its_settings_and_not_where_it_runs(root, network, task):
    key = task(root).content_key(network)
    assert task(root, num_workers=1).content_key(network) == key
    assert task(root, transform="timm").content_key(network) != key


def test_too_few_images_are_counted(root, network, task):
    with pytest.raises(ValueError, match=r"holds 3000 training images; .* needs 3001"):
        task(root, num_calibration=2991).calibration(network)


def test_analyses_take_disjoint_validation_images_of_every_class(root, network, task):
    imagenet = task(root, num_factors_per_class=1, num_held_out_per_class=1, batch_size=500)
    first, second = imagenet.analysis(network)
    for part in (first, second):
        assert torch.cat([labels for _, labels in part]).sort().values.equal(torch.arange(1000))
    assert first.content_key != second.content_key
    assert sorted(seen(first) + seen(second)) == sorted(seen(imagenet.evaluation(network)))
    with pytest.raises(ValueError, match="needs 18 evaluation images of every class; one has 2"):
        task(root).analysis(network)


def epoch_of(task, root, network, epoch=0, seed=0, **fields):
    return task(root, **fields).training(network, epoch, seed)


def test_an_epoch_of_training_shows_every_image_once(roots, network, task):
    """3,000 pictures in four batches; what would not fill another one is left out."""
    batches = epoch_of(task, roots["folders"], network, batch_size=700, training_augmentation="crop")
    labels = torch.cat([labels for _, labels in batches])
    assert len(batches) == 4 and len(labels) == 2800 and labels.bincount().max() == 3
    assert not labels.equal(labels.sort().values)


@pytest.mark.parametrize("augmentation", ["crop", "deit"])
def test_a_training_batch_is_the_same_wherever_it_is_made(roots, network, task, augmentation):
    """In another slice, layout or worker; and random draws elsewhere stay what they were."""
    settings = {"training_augmentation": augmentation, "batch_size": 40}
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    expected = list(epoch_of(task, roots["folders"], network, **settings)[:6])
    assert before[0].equal(torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    again = epoch_of(task, roots["tars"], network, num_workers=2, **settings)[1:6:2]
    assert len(again) == 3
    for (images, labels), (same_images, same_labels) in zip(again, expected[1::2], strict=True):
        assert images.equal(same_images) and labels.equal(same_labels)


def test_training_reads_shards_too(roots, network, task):
    [(images, _)] = epoch_of(task, roots["shards"], network)[7:8]
    [(expected, _)] = epoch_of(task, roots["folders"], network)[7:8]
    assert images.equal(expected)


def test_batches_that_are_skipped_are_not_decoded(roots, network, task, monkeypatch):
    batches = epoch_of(task, roots["folders"], network)
    files, reads = type(batches.batches.files), []
    read = files.read
    monkeypatch.setattr(files, "read", lambda self, index: reads.append(index) or read(self, index))
    list(batches[-2:])
    assert len(reads) == len(set(reads)) == 16


def test_every_epoch_and_seed_has_its_own_order(roots, network, task):
    firsts = [
        next(iter(epoch_of(task, roots["folders"], network, *numbers, training_augmentation="crop")))
        for numbers in ((0, 0), (1, 0), (0, 1))
    ]
    assert len({images.numpy().tobytes() for images, _ in firsts}) == 3


def test_training_mixes_images_and_labels_as_deit_does(roots, network, task):
    _, labels = next(iter(epoch_of(task, roots["folders"], network)))
    assert labels.shape == (8, 1000) and torch.allclose(labels.sum(dim=1), torch.ones(8))
    assert labels.min() == pytest.approx(0.1 / 1000)
