"""Decoded images that are kept: the same pixels, decoded once, and never those of another image."""

import os

import pytest
import timm
import torch

import facts.tasks.classification.image_batches as image_batches
from tests.tasks import fake_imagenet


@pytest.fixture
def decoded(monkeypatch):
    """Counts the images that are decoded by this process."""
    counts, decode = [], image_batches.decode

    def counting(data):
        counts.append(len(data))
        return decode(data)

    monkeypatch.setattr(image_batches, "decode", counting)
    return counts


def pixels(batches):
    return [(images, labels) for images, labels in batches]


def same(first, second):
    return all(a.equal(b) and x.equal(y) for (a, x), (b, y) in zip(first, second, strict=True))


@pytest.mark.parametrize("transform", ["paper", "timm"])
def test_they_are_the_same_to_the_bit_and_decoded_once(root, network, task, tmp_path, transform, decoded):
    plain, kept = (task(root, transform=transform, crops=crops) for crops in (None, tmp_path))
    expected = pixels(plain.calibration(network))
    for first, number in ((True, 24), (False, 0)):
        decoded.clear()
        assert same(pixels(kept.calibration(network)), expected), first
        assert len(decoded) == number
    assert kept.content_key(network) == plain.content_key(network)


def test_processes_share_them(roots, network, task, tmp_path, decoded):
    expected = pixels(task(roots["folders"]).evaluation(network))
    shared = task(roots["folders"], crops=tmp_path, num_workers=2)
    assert same(pixels(shared.evaluation(network)), expected)
    decoded.clear()
    assert same(pixels(task(roots["folders"], crops=tmp_path).evaluation(network)), expected) and not decoded


def test_networks_that_differ_in_normalisation_share_them(roots, network, task, tmp_path, decoded):
    other = timm.create_model("test_vit", pretrained_cfg_overlay={**network.pretrained_cfg, "mean": (0.1, 0.2, 0.3)})
    imagenet = task(roots["folders"], crops=tmp_path)
    first = pixels(imagenet.calibration(network))
    decoded.clear()
    assert not same(pixels(imagenet.calibration(other)), first) and not decoded
    assert len(list(tmp_path.iterdir())) == 1


def test_augmented_images_are_not_kept(roots, network, task, tmp_path):
    pixels(task(roots["folders"], crops=tmp_path, augmentation="train").calibration(network))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["bytes", "cut short"])
def test_what_is_damaged_is_decoded_again(roots, network, task, tmp_path, decoded, damage):
    imagenet = task(roots["folders"], crops=tmp_path)
    expected = pixels(imagenet.calibration(network))
    (path,) = tmp_path.iterdir()
    if damage == "bytes":
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(bytes(100))
    else:
        os.truncate(path, path.stat().st_size - 10)
    decoded.clear()
    assert same(pixels(imagenet.calibration(network)), expected) and len(decoded) == 1


def test_a_changed_image_is_noticed(files, network, task, tmp_path, decoded):
    fake_imagenet.write_folders(tmp_path / "images", files)
    imagenet = task(tmp_path / "images", crops=tmp_path / "crops")
    first = torch.cat([images for images, _ in imagenet.calibration(network)])
    names = imagenet.chosen_images()["calibration"]["names"]
    one, other = (tmp_path / "images" / "train" / name for name in names[:2])
    one.write_bytes(other.read_bytes())
    decoded.clear()
    second = torch.cat([images for images, _ in imagenet.calibration(network)])
    assert len(decoded) == 1
    assert second[0].equal(first[1]) and second[1:].equal(first[1:])


@pytest.mark.parametrize(("write", "pattern"), [("write_tars", "*train.tar"), ("write_shards", "data/train-*")])
def test_a_changed_archive_is_noticed(files, network, task, tmp_path, decoded, write, pattern):
    """Its images, all of them, are decoded again."""
    (tmp_path / "images").mkdir()
    getattr(fake_imagenet, write)(tmp_path / "images", files)
    pixels(task(tmp_path / "images", crops=tmp_path / "crops").calibration(network))
    for path in (tmp_path / "images").glob(pattern):
        os.utime(path, ns=(0, 0))
    decoded.clear()
    pixels(task(tmp_path / "images", crops=tmp_path / "crops").calibration(network))
    assert len(decoded) == 24


def test_an_analysis_reads_what_an_evaluation_has_kept(roots, network, task, tmp_path, decoded):
    imagenet = task(roots["folders"], crops=tmp_path, num_factors_per_class=1, num_held_out_per_class=1)
    pixels(imagenet.evaluation(network))
    decoded.clear()
    assert all(map(pixels, imagenet.analysis(network))) and not decoded


def test_an_image_that_cannot_be_decoded_is_never_kept(files, network, task, tmp_path, caplog):
    fake_imagenet.write_folders(tmp_path / "images", files)
    imagenet = task(tmp_path / "images", crops=tmp_path / "crops")
    name = imagenet.chosen_images()["calibration"]["names"][0]
    (tmp_path / "images" / "train" / name).write_bytes(b"no image")
    for _ in range(2):
        caplog.clear()
        assert sum(len(images) for images, _ in imagenet.calibration(network)) == 23
        assert "cannot be decoded and is left out" in caplog.text
