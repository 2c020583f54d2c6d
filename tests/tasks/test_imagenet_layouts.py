"""The same made-up ImageNet in class folders, tar files and parquet shards."""

import pickle
import shutil

import pyarrow.parquet as pq
import pytest
import torch

import facts
from facts.estimators import SVDLLM
from facts.tasks.classification.imagenet_files import find_images, synsets
from tests.tasks.fake_imagenet import write_tar


def joined(batches) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize("split", ["train", "val"])
def test_images_come_in_the_order_of_synset_and_file_name(root, files, split):
    images = find_images(root, split)
    assert images.names == sorted(files[split])
    assert images.labels.tolist() == [synsets().index(name.split("/")[0]) for name in images.names]
    for index in (0, 1, 977, len(images) - 1):
        assert images.read(index) == files[split][images.names[index]]


def test_every_layout_gives_the_same_batches_under_the_same_keys(roots, network, task):
    """So that a cell is not run again because its images were packed."""
    reference = task(roots["folders"], num_factors_per_class=1, num_held_out_per_class=1)
    for layout in ("tars", "shards"):
        other = task(roots[layout], num_factors_per_class=1, num_held_out_per_class=1)
        assert other.content_key(network) == reference.content_key(network)
        assert other.chosen_images() == reference.chosen_images()
        for part in ("calibration", "sensitivity"):
            expected, found = getattr(reference, part)(network), getattr(other, part)(network)
            assert found.content_key == expected.content_key
            for (images, labels), (other_images, other_labels) in zip(expected, found, strict=True):
                assert images.equal(other_images) and labels.equal(other_labels)


def test_evaluation_sees_every_validation_image_once(root, network, task, files):
    images, labels = joined(task(root, batch_size=300).evaluation(network))
    assert len(images.flatten(1).unique(dim=0)) == len(images) == 2000
    assert labels.bincount().tolist() == [2] * 1000


def test_a_network_is_compressed_and_evaluated(root, network, task, tmp_path):
    imagenet = task(root, batch_size=100)
    calibration = imagenet.calibration(network)
    result = facts.compress(
        network, calibration, estimator=SVDLLM(), loss=imagenet.loss, execution=facts.Execution(cache=tmp_path)
    )
    images, labels = joined(imagenet.evaluation(network))
    with torch.inference_mode():
        right = (result.model(images).argmax(dim=-1) == labels).sum().item()
    assert imagenet.evaluate(result.model)["top1"] == pytest.approx(100 * right / 2000, abs=0.11)


@pytest.mark.system
@pytest.mark.parametrize("layout", ["tars", "shards"])
def test_workers_read_what_one_process_reads(roots, network, task, layout):
    for part in ("calibration", "evaluation"):
        tasks = (task(roots[layout], num_workers=count, batch_size=100) for count in (0, 2))
        alone, shared = (getattr(imagenet, part)(network) for imagenet in tasks)
        for _ in range(2):  # workers come and go, and what they read must stay
            for first, second in zip(joined(alone), joined(shared), strict=True):
                assert first.equal(second)


def test_images_can_be_pickled_after_they_were_read(root, files):
    images = find_images(root, "train").gathered([5, 2999])
    first, pickled = images.read(0), pickle.dumps(images)
    owner = getattr(images, "owner", None)  # the temporary folder stays
    del images  # an open file does not: what was pickled must open its own, as in another process
    assert pickle.loads(pickled).read(0) == first == files["train"][sorted(files["train"])[5]]
    del owner


def test_tar_files_are_indexed_once(roots, tmp_path, files, monkeypatch):
    root = shutil.copytree(roots["tars"], tmp_path / "tars", ignore=shutil.ignore_patterns("*.json"))
    find_images(root, "train")
    with monkeypatch.context() as patched:
        patched.setattr("facts.tasks.classification.imagenet_files.tars.members_of", None)
        assert find_images(root, "train").names == sorted(files["train"])
    index = root / "ILSVRC2012_img_train.index.json"
    index.write_text(index.read_text()[:1000])
    assert find_images(root, "train").names == sorted(files["train"])


def test_an_index_of_another_file_is_not_used(roots, tmp_path):
    root = shutil.copytree(roots["tars"], tmp_path / "tars")
    before = find_images(root, "val")
    other = {name.split("/")[1]: before.read(index) + b"more" for index, name in enumerate(before.names)}
    write_tar(root / "ILSVRC2012_img_val.tar", other)
    assert find_images(root, "val").read(3) == other[before.names[3].split("/")[1]]


def test_tars_whose_folder_is_read_only_are_read_without_an_index(roots, tmp_path, files, monkeypatch, caplog):
    root = shutil.copytree(roots["tars"], tmp_path / "tars", ignore=shutil.ignore_patterns("*.json"))

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("facts.tasks.classification.imagenet_files.tars.replacing", refuse)
    assert find_images(root, "val").names == sorted(files["val"])
    assert "cannot be written (Permission denied)" in caplog.text


@pytest.fixture
def row_groups(monkeypatch):
    """The row groups that were read, in order."""
    read = []
    original = pq.ParquetFile.read_row_group

    def counted(self, group, **options):
        read.append(group)
        return original(self, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    return read


def test_no_row_group_is_read_twice(roots, network, task, row_groups):
    imagenet = task(roots["shards"], num_calibration=2000)
    assert len(imagenet.validation_images) == 2000 and not row_groups
    calibration = imagenet.calibration(network)
    assert not row_groups  # the key alone may be all that is asked for
    for _ in range(2):
        joined(calibration)
        assert len(row_groups) == 16 + 15
    row_groups.clear()
    joined(imagenet.evaluation(network))
    assert len(row_groups) == 11 + 10


def test_one_row_group_is_kept_and_no_more(roots, row_groups):
    images = find_images(roots["shards"], "val").as_stored()
    for index in (0, 1, 1500, 0):
        images.read(index)
    assert len(row_groups) == 3


def test_images_of_shards_are_gone_from_the_temporary_folder_with_their_batches(roots, network, task):
    calibration = task(roots["shards"]).calibration(network)
    next(iter(calibration))
    folder = calibration.loader.dataset.files.owner.path
    assert folder.exists()
    del calibration
    assert not folder.exists()


@pytest.mark.parametrize("use", ["calibration", "evaluation"])
def test_processes_read_their_own_batches_and_no_others(root, network, task, use):
    """Of three, each the batches of its turn: the same ones that one process would see."""
    imagenet = task(root, batch_size=7 if use == "calibration" else 300)
    whole = list(getattr(imagenet, use)(network))
    shares = [list(getattr(imagenet, use)(network).shard(rank, 3)) for rank in range(3)]
    for number, (images, labels) in enumerate(whole):
        theirs, their_labels = shares[number % 3][number // 3]
        assert torch.equal(images, theirs) and torch.equal(labels, their_labels)
    assert sum(map(len, shares)) == len(whole) > 3
