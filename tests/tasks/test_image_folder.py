"""Pictures of one's own: which are calibrated on, what their labels mean, and what is said where they do not fit."""

import logging

import pytest
import timm
import torch

from facts.tasks.classification.image_folder import ImageFolder
from facts.tasks.classification.imagenet import synsets
from tests.cli.pictures import write_images

SYNSETS = (synsets()[7], synsets()[400])


def network(num_classes):
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=num_classes).eval()


def task(root, **fields):
    return ImageFolder(root=root, num_workers=0, **{"batch_size": 4, **fields})


def labels(batches):
    return sorted(torch.cat([labels for _, labels in batches]).tolist())


class TestParts:
    def test_without_parts_each_image_is_calibrated_or_evaluated_on(self, tmp_path):
        photos = task(write_images(tmp_path / "photos", number=5))
        training, evaluation = photos.training_images.names, photos.validation_images.names
        assert (len(training), len(evaluation)) == (8, 7)
        assert not {*training} & {*evaluation}
        assert evaluation == task(photos.root, seed=1).validation_images.names

    @pytest.mark.parametrize("name", ["val", "validation", "test"])
    def test_parts_are_taken_as_they_are(self, tmp_path, name):
        write_images(tmp_path / "train", number=3)
        write_images(tmp_path / name, number=2, seed=1)
        photos = task(tmp_path)
        assert {path.split("/")[0] for path in photos.training_images.names} == {"train"}
        assert {path.split("/")[0] for path in photos.validation_images.names} == {name}
        assert photos.inspect().startswith("9 images to calibrate on, 6 to evaluate on, 3 classes")

    def test_one_part_alone_is_divided(self, tmp_path):
        photos = task(write_images(tmp_path / "val", number=2).parent)
        assert (len(photos.training_images), len(photos.validation_images)) == (3, 3)
        assert photos.classes == ["cat", "dog", "fox"]

    def test_a_class_missing_from_one_part_has_its_label_all_the_same(self, tmp_path):
        write_images(tmp_path / "train", classes=("cat", "dog", "fox"), number=1)
        write_images(tmp_path / "val", classes=("fox",), number=2)
        assert labels(task(tmp_path).evaluation(network(3))) == [2, 2]

    def test_seed_and_number_choose_what_to_calibrate_on(self, tmp_path):
        root = write_images(tmp_path / "photos", number=6)
        chosen = {seed: task(root, seed=seed, num_calibration=5).chosen_indices()["calibration"] for seed in (0, 1)}
        assert chosen[0] != chosen[1]
        assert [len(each) for each in chosen.values()] == [5, 5]
        assert len(task(root).chosen_indices()["calibration"]) == 9

    def test_other_images_of_the_same_names_are_told_apart(self, tmp_path):
        first, second = (write_images(tmp_path / str(seed), seed=seed) for seed in (0, 1))
        model = network(3)
        assert task(first).calibration(model).content_key != task(second).calibration(model).content_key
        assert task(first).content_key(model) == task(first).content_key(model)

    @pytest.mark.parametrize("name", ["train", "val", "validation", "test"])
    def test_a_class_may_be_called_like_a_part(self, tmp_path, name):
        photos = task(write_images(tmp_path / "vehicles", ("bus", "car", name)))
        assert photos.classes == sorted(["bus", "car", name])
        assert len(photos.training_images) + len(photos.validation_images) == 12

    def test_parts_without_classes_hold_images_alone(self, tmp_path):
        for name, number in (("train", 3), ("val", 2)):
            write_images(tmp_path, (name,), number=number)
        photos = task(tmp_path)
        assert (len(photos.training_images), len(photos.validation_images), photos.classes) == (3, 2, [])

    def test_a_part_may_have_something_else_beside_it(self, tmp_path):
        write_images(tmp_path / "train")
        write_images(tmp_path, ("notes",))
        assert task(tmp_path).classes == ["cat", "dog", "fox"]


class TestLabels:
    def test_classes_are_numbered_in_their_order(self, tmp_path):
        photos, model = task(write_images(tmp_path / "photos")), network(3)
        assert labels([*photos.calibration(model), *photos.evaluation(model)]) == [0] * 4 + [1] * 4 + [2] * 4
        assert photos.evaluate(model)["top1"] in [100 * correct / 6 for correct in range(7)]

    def test_a_folder_without_images_is_no_class(self, tmp_path):
        root = write_images(tmp_path / "photos")
        (root / "aaa").mkdir()
        (root / "bbb").mkdir()
        (root / "bbb" / "notes.txt").touch()
        photos, model = task(root), network(3)
        assert photos.classes == ["cat", "dog", "fox"]
        assert labels([*photos.calibration(model), *photos.evaluation(model)]) == [0] * 4 + [1] * 4 + [2] * 4

    def test_other_labels_of_the_same_images_have_other_keys(self, tmp_path):
        """A class of the other part moves the labels, and leaves the images to calibrate on as they are."""
        root, model = write_images(tmp_path / "train").parent, network(4)
        keys = []
        for name in ("aaa", "zzz"):
            write_images(tmp_path / "val", (name,))
            photos = task(root)
            keys.append((photos.calibration(model).content_key, photos.content_key(model)))
            (tmp_path / "val").rename(tmp_path / f"was {name}")
        assert keys[0][0] != keys[1][0]
        assert keys[0][1] != keys[1][1]

    def test_the_labels_of_the_network_are_in_the_key(self, tmp_path):
        photos, few, many = task(write_images(tmp_path / "photos", SYNSETS)), network(2), network(1000)
        assert photos.calibration(few).content_key != photos.calibration(many).content_key
        assert photos.content_key(few) != photos.content_key(many)

    def test_synsets_have_the_labels_of_imagenet(self, tmp_path):
        photos, model = task(write_images(tmp_path / "photos", SYNSETS)), network(1000)
        assert labels([*photos.calibration(model), *photos.evaluation(model)]) == [7] * 4 + [400] * 4

    def test_synsets_are_classes_of_their_own_to_a_network_of_as_many(self, tmp_path):
        photos, model = task(write_images(tmp_path / "photos", SYNSETS)), network(2)
        assert {*labels([*photos.calibration(model), *photos.evaluation(model)])} == {0, 1}

    def test_finetuning_sees_the_same_labels(self, tmp_path):
        photos = task(write_images(tmp_path / "photos", SYNSETS), training_augmentation="crop", batch_size=2)
        assert {*labels(photos.training(network(1000), epoch=0))} <= {7, 400}

    def test_other_classes_leave_images_alone(self, tmp_path):
        photos, model = task(write_images(tmp_path / "photos")), network(1000)
        batches = photos.calibration(model)
        assert [tuple(images.shape) for images in batches] == [(4, 3, 160, 160), (2, 3, 160, 160)]
        assert [tuple(images.shape) for images in batches.shard(1, 2)] == [(2, 3, 160, 160)]
        with pytest.raises(ValueError, match="3 class folders, and the network 1000 classes"):
            photos.evaluation(model)
        with pytest.raises(ValueError, match="these images need labels"):
            photos.training(model, epoch=0)

    def test_images_without_class_folders_are_calibrated_on(self, tmp_path):
        root = write_images(tmp_path / "photos", ("all",)) / "all"
        assert sum(len(images) for images in task(root).calibration(network(3))) == 2


class TestErrors:
    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere: give one that holds a folder of images"):
            task(tmp_path / "nowhere").inspect()

    def test_no_images(self, tmp_path):
        (tmp_path / "cat").mkdir()
        (tmp_path / "cat" / "notes.txt").touch()
        with pytest.raises(ValueError, match=r"holds no images \(.jpg, .*\), nor do folders in it"):
            task(tmp_path).inspect()

    def test_an_image_that_cannot_be_decoded_is_left_out_and_named(self, tmp_path, caplog):
        write_images(tmp_path / "train")
        write_images(tmp_path / "val")
        (tmp_path / "train" / "dog" / "1.png").write_bytes(b"no image")
        with caplog.at_level(logging.WARNING):
            assert len(labels(task(tmp_path).calibration(network(3)))) == 11
        assert "train/dog/1.png cannot be decoded and is left out" in caplog.text
