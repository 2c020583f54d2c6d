"""Images of your own: the choice for calibration, the meaning of their labels, and errors."""

import os

import numpy as np
import pytest
import timm
import torch

from facts.tasks import ImageFolder
from facts.tasks.classification.base import halves
from facts.tasks.classification.files import synsets
from tests.cli.conftest import write_images
from tests.refusals import refused, refuses


def network(num_classes):
    return timm.create_model("test_vit", num_classes=num_classes).eval()


def task(root, **fields):
    return ImageFolder(root=root, num_workers=0, **{"batch_size": 4, **fields})


def labels(batches):
    return sorted(torch.cat([labels for _, labels in batches]).tolist())


class TestParts:
    def test_images_without_parts_are_divided(self, tmp_path):
        photos = task(write_images(tmp_path / "photos", number=5))
        training, evaluation = photos.training_images.names, photos.validation_images.names
        assert (len(training), len(evaluation)) == (9, 6)  # of each class, half calibrates, rounded up
        assert not {*training} & {*evaluation}
        assert evaluation == task(photos.root, seed=1).validation_images.names
        chosen = [task(photos.root, seed=seed, num_calibration=5).chosen_indices()["calibration"] for seed in (0, 1)]
        assert chosen[0] != chosen[1] and [len(each) for each in chosen] == [5, 5]
        assert len(photos.chosen_indices()["calibration"]) == 9

    @pytest.mark.parametrize("name", ["val", "valid", "validation", "dev", "eval", "test", "Testing"])
    def test_parts_are_taken_as_they_are_and_one_alone_is_divided(self, tmp_path, name, caplog):
        write_images(tmp_path / name, classes=("fox",), number=2, seed=1)
        alone = task(tmp_path)
        assert (len(alone.training_images), len(alone.validation_images), alone.classes) == (1, 1, ["fox"])
        write_images(tmp_path / "train", number=3)
        write_images(tmp_path / "notes", ("notes",))
        photos = task(tmp_path)
        assert {path.split("/")[0] for path in photos.training_images.names} == {"train"}
        assert {path.split("/")[0] for path in photos.validation_images.names} == {name}
        assert photos.inspect().startswith("9 images to calibrate on, 2 to evaluate on, 3 classes")
        assert labels(photos.evaluation(network(3))) == [2, 2]  # though the other classes are missing there
        assert "4 files and folders at " in caplog.text and "4 in notes/ (notes/notes/0.png, " in caplog.text

    def test_a_class_may_be_called_like_a_part(self, tmp_path):
        root = write_images(tmp_path / "vehicles", ("bus", "car", "test"))
        (root / "aaa").mkdir()  # which holds no images and is no class
        photos = task(root)
        assert photos.classes == ["bus", "car", "test"]
        assert len(photos.training_images) + len(photos.validation_images) == 12

    def test_parts_without_classes_hold_images_alone(self, tmp_path):
        for name, number in (("train", 3), ("val", 2)):
            write_images(tmp_path, (name,), number=number)
        photos = task(tmp_path)
        assert (len(photos.training_images), len(photos.validation_images), photos.classes) == (3, 2, [])
        assert sum(len(images) for images in photos.calibration(network(3))) == 3


class TestLabels:
    def test_synsets_have_the_labels_of_imagenet_or_are_classes_of_their_own(self, tmp_path):
        root = write_images(tmp_path / "photos", (synsets()[7], synsets()[400]))
        photos = task(root, training_augmentation="crop", batch_size=2)
        few, many = network(2), network(1000)
        used = [labels([*photos.calibration(each), *photos.evaluation(each)]) for each in (many, few)]
        assert used[0] == [7] * 4 + [400] * 4 and {*used[1]} == {0, 1}
        assert {*labels(photos.training(many, epoch=0))} <= {7, 400}
        assert photos.calibration(few).content_key != photos.calibration(many).content_key
        assert photos.content_key(few) != photos.content_key(many)

    def test_other_images_and_other_labels_have_other_keys(self, tmp_path):
        """A class of the other part moves the labels, and leaves the images to calibrate on as they are."""
        model, keys = network(4), []
        for root, seed, name in (("a", 0, "aaa"), ("b", 0, "zzz"), ("c", 1, "zzz")):
            write_images(tmp_path / root / "train", seed=seed)
            write_images(tmp_path / root / "val", (name,))
            photos = task(tmp_path / root)
            keys.append((photos.calibration(model).content_key, photos.content_key(model)))
        assert len({key for key, _ in keys}) == len({key for _, key in keys}) == 3

    def test_other_classes_leave_images_alone(self, tmp_path):
        photos, model = task(write_images(tmp_path / "photos")), network(1000)
        batches = photos.calibration(model)
        assert [tuple(images.shape) for images in batches] == [(4, 3, 160, 160), (2, 3, 160, 160)]
        assert [tuple(images.shape) for images in batches[1::2]] == [(2, 3, 160, 160)]
        refuses("3 class folders, and the network 1000 classes", photos.evaluation, model)


@pytest.fixture
def root(tmp_path):
    """Two parts, whose images are listed in no order, with labels of the network; one image is not listed."""
    for part in ("calibration", "validation"):
        write_images(tmp_path, (part,), number=3)
    rows = ["calibration/1.png,7", "validation/0.png,2", "calibration/0.png,0", "validation/2.png,9"]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows, ""]))
    return tmp_path


def test_images_and_labels_are_those_listed_in_this_order(root, caplog):
    photos, model = task(root), network(10)
    assert photos.training_images.names == ["calibration/1.png", "calibration/0.png"]
    assert [labels.tolist() for _, labels in photos.evaluation(model)] == [[2, 9]]
    assert "left out: 2 not in labels.csv (calibration/2.png, validation/1.png)" in caplog.text
    assert photos.evaluate(model)["top1"] in (0, 50, 100)
    refuses(r"labels.csv has labels up to 9, and those of the network end at 8", photos.evaluation, network(9))
    before = photos.content_key(model)
    (root / "labels.csv").write_text((root / "labels.csv").read_text().replace(",9", ",8"))
    assert task(root).content_key(model) != before


def inspect(row, root):
    (root / "labels.csv").write_text(f"{'label,file' if row == '1' else 'file,label'}\n{row}\n")
    task(root).inspect()


test_tables_that_cannot_be = refused(
    ("calibration/9.png,0", "labels.csv names 1 files that are not there: calibration/9.png"),
    ("calibration/2.png", "needs columns `file` and `label`, of whole numbers"),
    ("1", "needs columns `file` and `label`, of whole numbers"),
    ("calibration/2.png,-1", "needs rows with labels from 0 on"),
    ("calibration/2.png,99999999", "needs rows with labels from 0 on, at most 1,000,000"),
    ("calibration/2.png," + "9" * 20, "needs columns `file` and `label`, of whole numbers, .* OverflowError"),
    by=inspect,
    error=(ValueError, FileNotFoundError),
)


def test_folders_without_images(tmp_path):
    missing = task(tmp_path / "nowhere")
    refuses("no folder .*nowhere: give one that holds a folder of images", missing.inspect, raised=FileNotFoundError)
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    refuses(r"holds no images \(.jpg, .*\), nor do folders in it", task(tmp_path / "empty").inspect)


@pytest.mark.attack
def test_what_only_has_the_name_of_an_image_is_left_out(tmp_path, caplog):
    """A pipe would be read for ever."""
    photos = task(write_images(tmp_path / "photos"), whole=True)
    os.mkfifo(photos.root / "cat" / "pipe.png")
    (photos.root / "dog" / "folder.jpg").mkdir()
    (photos.root / "fox" / "link.jpg").symlink_to("gone")
    (photos.root / "fox" / "._0.png").write_bytes(b"what macOS adds")
    (photos.root / "0.png").write_bytes(b"of no class")
    (photos.root / "fox" / "notes.txt").touch()
    assert labels(photos.evaluation(network(3))) == [0] * 4 + [1] * 4 + [2] * 4
    (line,) = caplog.messages
    kinds = ["5 files and folders at ", "2 broken links or pipes (cat/pipe.png, fox/link.jpg)", "1 named *.txt"]
    kinds += ["1 empty or unreadable folders (dog/folder.jpg)", "1 beside the class folders (0.png)"]
    assert all(kind in line for kind in kinds)


def test_folders_in_class_folders_belong_to_the_class(tmp_path):
    """Also by links, which may lead around in a circle."""
    root = write_images(tmp_path / "photos", ("cat", "dog/2023", "dog/2024/june"))
    (root / "dog" / "circle").symlink_to(root)
    (root / "dog" / "itself.png").symlink_to("itself.png")
    (root / "fox").symlink_to(write_images(tmp_path / "elsewhere", ("fox",)) / "fox")
    photos = task(root, whole=True)
    assert photos.classes == ["cat", "dog", "fox"]
    assert labels(photos.evaluation(network(3))) == [0] * 4 + [1] * 8 + [2] * 4


def test_each_class_is_halved():
    """One image of a class calibrates; if no class has two, halves are of all."""
    labels = np.array([3, 0, 1, 0, 1, 2, 1])
    first, others = halves(labels)
    assert sorted([*first, *others]) == [*range(7)] and sorted(labels[first]) == [0, 1, 1, 2, 3]
    assert sorted(map(len, halves(np.arange(5)))) == [2, 3]


@pytest.mark.parametrize(("names", "is_clear"), [([*"012"], True), (["2", "10"], False), (["02", "10"], True)])
def test_folders_named_by_numbers_are_refused_if_their_order_is_not_clear(tmp_path, names, is_clear):
    photos = task(write_images(tmp_path / "photos", tuple(names), number=2))
    if is_clear:
        assert photos.labels(network(len(names))) == [*range(len(names))]
    else:
        refuses(r"are numbers, whose order as text \(10, 2, ...\) is another one", photos.labels, network(2))
        assert photos.labels(network(0)) == [0, 1]  # an encoder has no classes
