"""What is wrong with a folder of ImageNet is told, and images that cannot be decoded end no run."""

import os
import shutil
import sys

import pytest

from facts.tasks.classification.imagenet_files import find_images, synsets
from tests.tasks.fake_imagenet import tar_bytes, write_devkit, write_rows, write_shard, write_tar

pytestmark = pytest.mark.attack

FIRST = "n01440764"


@pytest.fixture
def copied(roots, tmp_path):
    """A function from a layout to a copy of its root, of hard links: files must be replaced, not written to."""

    def copy(layout):
        return shutil.copytree(roots[layout], tmp_path / layout, copy_function=os.link)

    return copy


def rewritten(path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def test_a_folder_that_holds_none_of_the_layouts_says_what_was_looked_for(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "ILSVRC2012_img_val.tar").touch()
    with pytest.raises(FileNotFoundError) as error:
        find_images(tmp_path, "train")
    for part in (
        f"no ImageNet at {tmp_path}",
        "class folders (train/, val/)",
        "ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, ILSVRC2012_devkit_t12.tar.gz",
        "data/train-*.parquet, data/validation-*.parquet",
        "found train/, ILSVRC2012_img_val.tar.",
        "Set root to a folder that holds one of the three.",
    ):
        assert part in str(error.value)
    with pytest.raises(FileNotFoundError, match="found none of these"):
        find_images(tmp_path / "nowhere", "train")


def test_missing_class_folders_are_named_and_counted(copied):
    root = copied("folders")
    for name in synsets()[:4]:
        shutil.rmtree(root / "train" / name)
    with pytest.raises(ValueError, match=rf"train holds no image of 4 of the 1000 classes: {FIRST}, \w+, \w+, \.\.\."):
        find_images(root, "train")
    for path in (root / "val" / FIRST).iterdir():  # an empty folder is a missing one
        path.unlink()
    with pytest.raises(ValueError, match=rf"val holds no image of 1 of the 1000 classes: {FIRST};"):
        find_images(root, "val")


def test_unknown_class_folders_are_named_and_counted(copied):
    root = copied("folders")
    (root / "val" / FIRST).rename(root / "val" / "tench")
    with pytest.raises(ValueError, match=r"val holds 1 classes that are none of ImageNet-1k: tench; .* synsets"):
        find_images(root, "val")


def test_classes_of_the_training_tar_are_checked(copied, files):
    path = copied("tars") / "ILSVRC2012_img_train.tar"
    inner = tar_bytes({"a.JPEG": b""})
    rewritten(path, tar_bytes({f"{FIRST}.tar": inner, "n99999999.tar": inner}))
    with pytest.raises(ValueError, match=r"train\.tar holds 1 classes .* n99999999"):
        find_images(path.parent, "train")
    rewritten(path, tar_bytes({f"{FIRST}.tar": inner}))
    with pytest.raises(ValueError, match=r"train\.tar holds no image of 999 of the 1000 classes"):
        find_images(path.parent, "train")


@pytest.mark.parametrize(("keep", "whole"), [(1536, True), (2048, False)])
def test_a_tar_within_the_tar_ends_where_it_ends(copied, files, keep, whole):
    """Cut after its first image, which takes three blocks with its header, or in the middle of the next."""
    path = copied("tars") / "ILSVRC2012_img_train.tar"
    inner = {name: {} for name in synsets()}
    for name, data in files["train"].items():
        inner[name.split("/")[0]][name.split("/")[1]] = data[:1000]
    tars = {f"{name}.tar": tar_bytes(images) for name, images in inner.items()}
    tars[f"{FIRST}.tar"] = tars[f"{FIRST}.tar"][:keep]
    path.unlink()
    write_tar(path, tars)
    if whole:
        assert find_images(path.parent, "train").names == sorted(files["train"])[2:]
    else:
        with pytest.raises(ValueError, match=rf"{FIRST}\.tar ends within {FIRST}_120\.JPEG.*fetch it again"):
            find_images(path.parent, "train")


@pytest.mark.parametrize(
    ("layout", "name", "split"),
    [
        ("tars", "ILSVRC2012_img_train.tar", "train"),
        ("tars", "ILSVRC2012_img_val.tar", "val"),
        ("tars", "ILSVRC2012_devkit_t12.tar.gz", "val"),
        ("shards", "data/train-00001-of-00002.parquet", "train"),
    ],
)
@pytest.mark.parametrize("keep", [0.4, 0])
def test_files_that_are_not_whole_are_named(copied, layout, name, split, keep):
    path = copied(layout) / name
    whole = path.read_bytes()
    rewritten(path, whole[: int(len(whole) * keep)])
    with pytest.raises(ValueError, match=rf"{path.name} .*fetch it again"):
        find_images(path.parents[name.count("/")], split)


def test_as_many_validation_images_as_labels_are_needed(copied, files):
    root = copied("tars")
    (root / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    write_devkit(root, [name.split("/")[0] for name in files["val"]][:-1])
    with pytest.raises(ValueError, match=r"val\.tar holds 2000 images, but .* tells the classes of 1999"):
        find_images(root, "val")


def test_a_devkit_without_its_parts_is_refused(copied):
    root = copied("tars")
    rewritten(root / "ILSVRC2012_devkit_t12.tar.gz", tar_bytes({"readme.txt": b""}, "w:gz"))
    with pytest.raises(ValueError, match=r"devkit_t12\.tar\.gz .* lacks something"):
        find_images(root, "val")


def test_shards_that_were_not_fetched_are_named(copied):
    root = copied("shards")
    (root / "data/train-00000-of-00002.parquet").unlink()
    with pytest.raises(ValueError, match="lacks 1 shards: -00000-of-00002"):
        find_images(root, "train")
    assert len(find_images(root, "val")) == 2000


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (({"bytes": b"", "path": f"{FIRST}_1_{FIRST}.JPEG"}, 1), rf"the label 1, which is n01443537 and not {FIRST}"),
        (({"bytes": b"", "path": "1.JPEG"}, -1), "label -1: it needs .* 0 to 999"),
        (({"bytes": b"", "path": None}, 0), "the image None of label 0: it needs a path"),
    ],
)
def test_rows_of_shards_are_checked(copied, row, message):
    path = copied("shards") / "data/train-00001-of-00002.parquet"
    path.unlink()
    write_rows(path, [row])
    with pytest.raises(ValueError, match=message):
        find_images(path.parents[1], "train")


def test_classes_of_shards_are_checked(copied):
    data = copied("shards") / "data"
    for path in data.glob("validation-*"):
        path.unlink()
    write_shard(data / "validation-a.parquet", {f"{FIRST}/a.JPEG": b""})
    with pytest.raises(ValueError, match=r"validation-\*\.parquet holds no image of 999 of the 1000 classes"):
        find_images(data.parent, "val")


def test_shards_of_other_columns_are_refused(copied):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = copied("shards") / "data/train-00001-of-00002.parquet"
    path.unlink()
    pq.write_table(pa.table({"jpg": [b""], "label": [0]}), path)
    with pytest.raises(ValueError, match=r"lacks the columns image\.bytes, image\.path: it must hold"):
        find_images(path.parents[1], "train")


def test_the_extra_that_reads_shards_is_named(roots, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '.\[parquet\]'"):
        find_images(roots["shards"], "train")
    assert len(find_images(roots["tars"], "val")) == 2000


def spoiled(root, files, layout, names) -> None:
    """Cut short the images of the calibration set by these names."""
    images = {name: data[:400] if name in names else data for name, data in files["train"].items()}
    if layout == "folders":
        for name in names:
            rewritten(root / "train" / name, images[name])
    elif layout == "tars":
        inner = {}
        for name, data in images.items():
            inner.setdefault(name.split("/")[0], {})[name.split("/")[1]] = data
        (root / "ILSVRC2012_img_train.tar").unlink()
        write_tar(root / "ILSVRC2012_img_train.tar", {f"{key}.tar": tar_bytes(part) for key, part in inner.items()})
    else:
        for path in (root / "data").glob("train-*"):
            path.unlink()
        write_shard(root / "data/train-0.parquet", images)


@pytest.mark.parametrize("layout", ["folders", "tars", "shards"])
def test_an_image_that_cannot_be_decoded_is_left_out_and_told_once(copied, files, roots, network, task, layout, caplog):
    name = task(roots["folders"]).chosen_images()["calibration"]["names"][3]
    root = copied(layout)
    spoiled(root, files, layout, [name])
    calibration = task(root, num_workers=2).calibration(network)
    whole = list(task(roots["folders"]).calibration(network))
    for _ in range(2):
        batches = list(calibration)
        assert [len(images) for images, _ in batches] == [7, 8, 8]
        assert batches[0][0].equal(whole[0][0][[0, 1, 2, 4, 5, 6, 7]])
        assert batches[0][1].equal(whole[0][1][[0, 1, 2, 4, 5, 6, 7]])
    assert calibration.corrupt == {name}
    assert caplog.text.count(f"{name} cannot be decoded and is left out (1 so far)") == 1


def test_a_batch_of_which_nothing_is_left_is_passed_over(copied, files, network, task):
    root = copied("folders")
    name = task(root).chosen_images()["calibration"]["names"][3]
    spoiled(root, files, "folders", [name])
    assert len(list(task(root, batch_size=1).calibration(network))) == 23


def test_a_training_batch_of_which_nothing_is_left_is_an_error(copied, files, network, task):
    """Steps are counted in batches, so that none can be passed over."""
    root = copied("folders")
    name = task(root).chosen_images()["calibration"]["names"][3]
    spoiled(root, files, "folders", [name])
    with pytest.raises(ValueError, match=f"no image of a training batch can be decoded: {name}; .* raise batch_size"):
        list(task(root, batch_size=1, training_augmentation="crop").training(network, 0))


def test_more_than_one_in_a_thousand_that_cannot_be_decoded_are_named(copied, files, network, task):
    root = copied("folders")
    names = task(root, num_calibration=2001).chosen_images()["calibration"]["names"][:3]
    spoiled(root, files, "folders", names[:2])
    with pytest.raises(
        ValueError, match=rf"^2 of 24 images cannot be decoded: {', '.join(sorted(names[:2]))}; at most"
    ):
        list(task(root).calibration(network))
    assert sum(len(labels) for _, labels in task(root, num_calibration=2001).calibration(network)) == 1999
    spoiled(root, files, "folders", names[2:])
    with pytest.raises(ValueError, match="3 of 2001 images"):
        list(task(root, num_calibration=2001).calibration(network))


def test_a_file_that_cannot_be_read_is_no_broken_image(copied, network, task):
    root = copied("folders")
    imagenet = task(root)
    name = imagenet.chosen_images()["calibration"]["names"][3]
    (root / "train" / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        list(imagenet.calibration(network))
