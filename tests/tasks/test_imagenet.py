"""ImageNet's splits, transforms, keys and layouts, on made-up pictures: 1,000 classes, of 8 x 8 pixels each."""

import os
import random
import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from facts.tasks import ImageNet
from facts.tasks.classification.files import find_imagenet, synsets
from tests.refusals import refuses

FIRST = "n01440764"
TRAIN_NUMBERS = (9, 120, 20)  # as text they are in another order than as numbers


def encoded(rng: np.random.Generator) -> bytes:
    buffer = BytesIO()
    Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def parquet_row(name: str, data: bytes) -> dict:
    """The path has the class appended, as on the hub."""
    synset, file = name.split("/")
    return {"image": {"bytes": data, "path": file.replace(".", f"_{synset}.")}, "label": synsets().index(synset)}


def write_shard(path: Path, rows: list[dict]) -> None:
    from datasets import ClassLabel, Dataset, Features, Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows, features=Features(image=Image(), label=ClassLabel(names=list(synsets())))).to_parquet(path)


@pytest.fixture(scope="module")
def files() -> dict[str, dict[str, bytes]]:
    """The training and validation pictures, three and two of each class, by `<synset>/<file>`."""
    rng = np.random.default_rng(0)
    train = {f"{name}/{name}_{number}.JPEG": encoded(rng) for name in synsets() for number in TRAIN_NUMBERS}
    labels = enumerate(rng.permutation(np.arange(2000) % 1000), start=1)
    val = {f"{synsets()[label]}/ILSVRC2012_val_{number:08}.JPEG": encoded(rng) for number, label in labels}
    return {"train": train, "val": val}


@pytest.fixture(scope="module")
def root(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    for split, images in files.items():
        for name, data in images.items():
            path = folder / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder


@pytest.fixture
def dataset_cache(tmp_path_factory, monkeypatch):
    """Data sets are converted here rather than in the home folder."""
    pytest.importorskip("datasets", reason="the extra `llm` is not installed: make install-llm")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def network():
    overlay = {"input_size": (3, 32, 32), "crop_pct": 1.0, "interpolation": "bilinear", "mean": (0.4, 0.5, 0.6)}
    arguments = {"img_size": 32, "depth": 1, "num_classes": 1000, "pretrained_cfg_overlay": overlay}
    return timm.create_model("vit_tiny_patch16_224", **arguments).eval()


def task(root, **fields) -> ImageNet:
    sizes = {"num_calibration": 24, "num_sensitivity": 10, "batch_size": 8, "num_workers": 0}
    return ImageNet(root=root, **sizes | fields)


def seen(batches) -> list[bytes]:
    """The pixels of every image: no two pictures are the same."""
    return [image.numpy().tobytes() for images, _ in batches for image in images]


def test_calibration_and_searches_have_the_shuffled_images_that_are_told_by_name(root, network, files):
    imagenet = task(root, augmentation="train")  # searches never see augmented images
    in_order = sorted(files["train"])
    shuffled = torch.randperm(3000, generator=torch.Generator().manual_seed(0)).tolist()
    chosen = imagenet.chosen_images()
    plain = {"sensitivity": imagenet.sensitivity(network), "calibration": task(root).calibration(network)}
    for use, indices in (("sensitivity", shuffled[:10]), ("calibration", shuffled[10:34])):
        names = [in_order[index] for index in indices]
        assert chosen[use] == {"indices": indices, "names": names}
        labels = torch.cat([labels for _, labels in plain[use]])
        assert labels.tolist() == [synsets().index(name.split("/")[0]) for name in names]
        assert seen(plain[use]) == seen(plain[use])
    assert len({*seen(plain["sensitivity"]), *seen(plain["calibration"])}) == 34
    refuses(r"holds 3000 training images; .* needs 3001", task(root, num_calibration=2991).calibration, network)


@pytest.mark.parametrize(("transform", "size", "sampling"), [("paper", 36, "BICUBIC"), ("timm", 32, "BILINEAR")])
def test_images_are_resized_cropped_and_normalised(root, network, files, transform, size, sampling):
    images, labels = next(iter(task(root, transform=transform).evaluation(network)))
    edge = (size - 32) // 2
    first = Image.open(BytesIO(files["val"][min(files["val"])]))
    expected = np.array(first.resize((size, size), Image.Resampling[sampling]).crop((edge, edge, edge + 32, edge + 32)))
    mean, std = (torch.tensor(network.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    assert images.shape == (8, 3, 32, 32) and labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(images[0], (torch.from_numpy(expected).permute(2, 0, 1) / 255 - mean) / std)


def test_augmented_calibration_is_random_by_seed(root, network):
    augmented, plain = (task(root, augmentation=each).calibration(network) for each in ("train", "none"))
    images, targets = next(iter(augmented))
    assert targets.shape == (8,) and task(root).loss(network(images), targets).isfinite()
    assert seen(augmented) == seen(augmented) != seen(plain) and augmented.content_key != plain.content_key


def test_keys_follow_what_they_depend_on(root, network):
    """Moments are found again when other sizes change."""
    calibration = {task(root, **change).calibration(network).content_key for change in ({}, {"num_workers": 1})}
    calibration |= {task(root, num_factors_per_class=1).calibration(network).content_key}
    assert len(calibration) == 1
    for change in ({"num_calibration": 7}, {"batch_size": 2}, {"transform": "timm"}, {"seed": 1}):
        assert task(root, **change).calibration(network).content_key not in calibration
    keys = [task(root, **change).content_key(network) for change in ({}, {"num_workers": 1}, {"transform": "timm"})]
    assert keys[0] == keys[1] != keys[2]


def test_analyses_take_disjoint_validation_images_of_every_class(root, network):
    imagenet = task(root, num_factors_per_class=1, num_held_out_per_class=1)
    parts = [part.items.files for part in imagenet.analysis(network)]
    assert all(sorted(files.labels) == list(range(1000)) for files in parts)
    assert sorted(parts[0].names + parts[1].names) == imagenet.validation_images.names
    refuses("needs 18 evaluation images of every class; one has 2", task(root).analysis, network)


class TestTraining:
    def test_every_epoch_and_seed_shows_every_image_once_in_its_own_order(self, root, network):
        """3,000 pictures in four batches; what would not fill another one is left out."""
        imagenet = task(root, batch_size=700)
        epochs = [imagenet.training(network, *numbers) for numbers in ((0, 0), (1, 0), (0, 1))]
        assert {len(batches) for batches in epochs} == {4}
        orders = [batches.items.files.names for batches in epochs]
        assert len(set(map(tuple, orders))) == 3 and len({tuple(sorted(order)) for order in orders}) == 1

    def test_a_batch_is_the_same_wherever_it_is_made(self, root, network):
        """In another slice or worker; others are not read, and random draws elsewhere stay what they were."""
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        expected = list(task(root, batch_size=40).training(network, 0)[:6])
        assert before[0].equal(torch.get_rng_state())
        assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
        again = list(task(root, batch_size=40, num_workers=2).training(network, 0)[1:6:2])
        torch.testing.assert_close(again, expected[1::2], rtol=0, atol=0)

    def test_images_and_labels_are_mixed_as_deit_does(self, root, network):
        _, labels = next(iter(task(root).training(network, 0)))
        assert labels.shape == (8, 1000) and torch.allclose(labels.sum(dim=1), torch.ones(8))
        assert labels.min() == pytest.approx(0.1 / 1000)


class TestLayouts:
    def test_parquet_files_hold_the_same_images_and_labels(self, files, root, dataset_cache, tmp_path, network):
        """Those of Hugging Face: two shards a split, in random order."""
        for split, images in (("train", files["train"]), ("validation", files["val"])):
            names = np.random.default_rng(2).permutation(list(images)).tolist()
            for shard in range(2):
                rows = [parquet_row(name, images[name]) for name in names[shard::2]]
                write_shard(tmp_path / "data" / f"{split}-{shard:05}-of-00002.parquet", rows)
        folders, shards = task(root), task(tmp_path)
        assert "1,000 classes" in shards.inspect() and folders.chosen_images() == shards.chosen_images()
        for name in ("calibration", "sensitivity", "evaluation"):
            ours, theirs = (list(getattr(each, name)(network)[:3]) for each in (folders, shards))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    @pytest.mark.parametrize(("name", "label", "synset"), [(f"{FIRST}_1", 1, "n01443537"), ("1", -1, "label -1")])
    def test_rows_of_other_classes_are_refused(self, dataset_cache, tmp_path, name, label, synset):
        row = {**parquet_row(f"{FIRST}/{name}.JPEG", b""), "label": label}
        for split in ("train", "validation"):
            write_shard(tmp_path / "data" / f"{split}-0.parquet", [row])
        refuses(rf"has the label {label}, which is {synset} and not {FIRST}", find_imagenet, tmp_path, "train")

    def test_without_images_it_says_what_unpacks_the_tar_files(self, tmp_path):
        (tmp_path / "train").mkdir()
        with pytest.raises(FileNotFoundError, match=rf"no ImageNet at {tmp_path}: .*torchvision\.datasets\.ImageNet"):
            find_imagenet(tmp_path, "train")

    def test_missing_and_unknown_class_folders_are_named_and_counted(self, copied):
        for name in synsets()[:4]:
            shutil.rmtree(copied / "train" / name)
        words = rf"train holds no image .* 4 of them: {FIRST}, \w+, \w+, \.\.\.; classes"
        refuses(words, find_imagenet, copied, "train")
        (copied / "val" / FIRST).rename(copied / "val" / "tench")
        refuses(r"val holds classes that are not in ImageNet-1k, 1 of them: tench;", find_imagenet, copied, "val")


@pytest.fixture
def copied(root, tmp_path):
    """A copy of the class folders, of hard links: files must be replaced, not written to."""
    return shutil.copytree(root, tmp_path / "copy", copy_function=os.link)


def spoil(root, names) -> None:
    for path in (root / "train" / name for name in names):
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[:400])


@pytest.mark.attack
class TestImagesThatCannotBeDecoded:
    def test_one_is_left_out_and_logged_once(self, copied, root, network, caplog):
        name = task(root).chosen_images()["calibration"]["names"][3]
        spoil(copied, [name])
        calibration, whole = task(copied, num_workers=2).calibration(network), list(task(root).calibration(network))
        for _ in range(2):
            batches = list(calibration)
            assert [len(images) for images, _ in batches] == [7, 8, 8]
            assert batches[0][0].equal(whole[0][0][[0, 1, 2, 4, 5, 6, 7]])
            assert batches[0][1].equal(whole[0][1][[0, 1, 2, 4, 5, 6, 7]])
        assert caplog.text.count(f"{name} cannot be decoded and is left out (1 so far)") == 1

    def test_a_batch_without_images_is_left_out_and_ends_a_training(self, copied, network):
        """Steps are counted in batches."""
        name = task(copied).chosen_images()["calibration"]["names"][3]
        spoil(copied, [name])
        assert len(list(task(copied, batch_size=1).calibration(network))) == 23
        with pytest.raises(ValueError, match=f"no image of a training batch can be decoded: {name}; .* raise batch"):
            list(task(copied, batch_size=1, training_augmentation="crop").training(network, 0))

    def test_more_than_one_in_a_thousand_are_an_error(self, copied, network):
        names = task(copied, num_calibration=2001).chosen_images()["calibration"]["names"][:2]
        spoil(copied, names)
        with pytest.raises(ValueError, match=rf"^2 of 24 images cannot be decoded: {', '.join(sorted(names))}; at"):
            list(task(copied).calibration(network))
        assert sum(len(labels) for _, labels in task(copied, num_calibration=2001).calibration(network)) == 1999

    def test_a_file_that_cannot_be_read_is_no_broken_image(self, copied, network):
        imagenet = task(copied)
        name = imagenet.chosen_images()["calibration"]["names"][3]
        (copied / "train" / name).unlink()
        refuses(name, list, imagenet.calibration(network), raised=FileNotFoundError)
