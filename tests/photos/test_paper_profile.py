"""On a published ViT-Tiny and real photos: cells of `profile=paper`, from files on disk to records."""

from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from experiments.config import CONF
from experiments.runner import open_cell, run_cell
from facts.tasks.classification import images
from facts.tasks.classification.files import find_imagenet
from tests.photos.data import PHOTOS, weights_of

pytestmark = pytest.mark.external

SIZES = {"num_calibration": 32, "num_sensitivity": 2, "num_workers": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """An ImageNet of class folders: a calibration photo of each class to train on, a validation photo to judge by.

    A class without a validation photo is judged by its calibration photo, since every class must be there.
    """
    root = tmp_path_factory.mktemp("imagenet")
    labels = pd.read_csv(PHOTOS / "labels.csv")
    train, val = (labels[labels.file.str.startswith(folder)] for folder in ("calibration/", "validation/"))
    val = pd.concat([val, train]).drop_duplicates("synset")
    for split, photos in (("train", train), ("val", val)):
        for photo in photos.itertuples():
            link = root / split / photo.synset / Path(photo.file).name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(PHOTOS / photo.file)
    return root


def few_to_judge_by(root, split):
    found = find_imagenet(root, split)
    return found.selected(range(0, len(found), 16)) if split == "val" else found


@pytest.fixture
def run(root, tmp_path, monkeypatch):
    """A function that runs a cell with overrides, judged by every sixteenth photo, and returns its record."""
    monkeypatch.setattr(images, "find_imagenet", few_to_judge_by)
    overrides = ["profile=paper", "tracking=off", f"imagenet={root}", f"results={tmp_path}"]
    overrides += [f"task.paper.{field}={value}" for field, value in SIZES.items()]
    overrides += ["model.paper.tag=vit_tiny_patch16_224", f"model.paper.weights={weights_of('vit_tiny')}"]

    def make(*own):
        with initialize_config_dir(CONF, version_base="1.3"):
            return run_cell(open_cell(compose("config", [*overrides, *own])))

    return make


def test_the_dense_network_reads_the_photos_as_it_was_trained_to(run):
    assert run("estimator=none").metrics["top1"] > 75


def test_facts_and_cors_keep_the_budget_and_the_network_useful(run):
    record = run("estimator=facts", "search=cors", "search.ratios=[0.4,0.8]", "ratio=0.8")
    assert record.metrics["gflops"] <= record.metrics["gflops_budget"]
    assert record.metrics["top1"] > 40  # chance is 0.1
