"""ImageNet's layout, splits and transforms, on a few made-up pictures."""

import pytest
import timm
import torch
from PIL import Image

import facts
from facts.tasks import ImageNet


@pytest.fixture
def root(tmp_path):
    """Two classes of six training and two validation pictures; a picture is all of one grey, its own."""
    for split, count in (("train", 6), ("val", 2)):
        for label in range(2):
            folder = tmp_path / split / f"n{label}"
            folder.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (60, 50), (20 * index + 10 * label,) * 3).save(folder / f"{index}.png")
    return tmp_path


@pytest.fixture
def model():
    overlay = {"input_size": (3, 32, 32)}
    arguments = {"img_size": 32, "depth": 1, "num_classes": 2, "pretrained_cfg_overlay": overlay}
    return timm.create_model("vit_tiny_patch16_224", **arguments).eval()


def task(root, **options) -> ImageNet:
    sizes = {"num_calibration": 8, "num_sensitivity": 3, "batch_size": 4}
    return ImageNet(root=root, num_workers=0, **{**sizes, **options})


def greys(batches) -> list[float]:
    return [round(image.mean().item(), 4) for images, _ in batches for image in images]


def test_calibration_is_the_part_of_one_shuffle_that_searches_leave(root, model):
    chosen = greys(task(root).calibration(model))
    assert len(chosen) == len(set(chosen)) == 8
    assert chosen == greys(task(root).calibration(model))
    assert chosen[1:] == greys(task(root, num_sensitivity=4, num_calibration=7).calibration(model))
    assert chosen != greys(task(root, seed=1).calibration(model))


def test_searches_compare_outputs_on_images_that_give_no_factors(root, model):
    imagenet = task(root, augmentation="train")
    kept, chosen = greys(imagenet.sensitivity(model)), greys(task(root).calibration(model))
    assert len(kept) == 3 and len({*kept, *chosen}) == 11
    assert kept == greys(imagenet.sensitivity(model))  # never augmented, which would be random
    assert imagenet.sensitivity(model).content_key != imagenet.calibration(model).content_key


def test_images_have_the_size_and_normalisation_of_the_model(root, model):
    (images, labels), *_ = task(root).evaluation(model)
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    assert images.shape == (4, 3, 32, 32) and labels.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(images[0], ((0 - mean) / std).expand(3, 32, 32))


def test_a_network_is_compressed_and_evaluated_through_the_task(root, model, tmp_path):
    imagenet = task(root)
    result = facts.compress(model, imagenet.calibration(model), loss=imagenet.loss, cache=tmp_path / "cache")
    assert imagenet.evaluate(result.model)["top1"] in (0, 25, 50, 75, 100)


@pytest.mark.parametrize("augmentation", ["train", "train_cutmix"])
def test_augmented_calibration_changes_the_key_and_feeds_the_loss(root, model, augmentation):
    plain, augmented = task(root).calibration(model), task(root, augmentation=augmentation).calibration(model)
    assert plain.content_key != augmented.content_key
    images, targets = next(iter(augmented))
    assert targets.shape == ((4,) if augmentation == "train" else (4, 2))
    assert task(root).loss(model(images), targets).isfinite()


def test_the_key_of_the_calibration_images_is_theirs_alone(root, model):
    """So that moments are found again when other sizes change."""
    key = task(root).calibration(model).content_key
    assert task(root, num_factors_per_class=1).calibration(model).content_key == key
    assert task(root, num_calibration=7).calibration(model).content_key != key
    assert task(root, batch_size=2).calibration(model).content_key != key


def test_keys_follow_the_files_and_not_where_they_lie(root, model, tmp_path_factory):
    key = task(root).content_key(model)
    elsewhere = tmp_path_factory.mktemp("moved") / "imagenet"
    root.rename(elsewhere)
    assert task(elsewhere).content_key(model) == key
    (elsewhere / "val/n0/0.png").rename(elsewhere / "val/n0/new.png")
    assert task(elsewhere).content_key(model) != key


def test_too_few_images_are_counted(root, model):
    with pytest.raises(ValueError, match=r"holds 12 images; .* needs 13"):
        task(root, num_calibration=10).calibration(model)


def test_analyses_take_disjoint_validation_images_of_every_class(root, model):
    imagenet = task(root, num_factors_per_class=1, num_held_out_per_class=1)
    first, second = imagenet.analysis(model)
    assert [sorted(labels.tolist()) for part in (first, second) for _, labels in part] == [[0, 1], [0, 1]]
    assert first.content_key != second.content_key
    assert sorted(greys(first) + greys(second)) == sorted(greys(imagenet.evaluation(model)))
    with pytest.raises(ValueError, match="needs 18 evaluation images of every class; one has 2"):
        task(root).analysis(model)
