"""Training of a detector and of segmenters from their classifiers, by the command that the doctor names."""

import re

import pytest

from experiments.config import instantiate
from experiments.doctor import sources
from experiments.mini.train import mini_recipe
from experiments.train_dense import train

pytestmark = pytest.mark.external

pytest.importorskip("mmdet", reason="the extra `detection` is not installed: make install-detection")


@pytest.fixture
def config(cell_config, few_scenes, tmp_path):
    """The small detector's, whose weights are not there yet, on the scenes that tests share."""
    small = ["finetuning.mini.num_epochs=1", "task.mini.batch_size=80", f"task.mini.root={few_scenes / 'coco'}"]
    model = ["model=mask_rcnn_swin_b", f"model.mini.weights={tmp_path / 'trained.safetensors'}"]
    training = ["task=coco", "estimator=none", "finetuning=train_mask_rcnn_swin_b"]
    return cell_config(*model, *training, *small)


def test_a_detector_is_trained_once_and_found_by_its_configuration(config, tmp_path):
    train(config)
    mini_recipe("mask_rcnn_swin_b", weights=str(tmp_path / "trained.safetensors")).build()
    with pytest.raises(FileExistsError, match=r"trained.safetensors exists: move it away"):
        train(config)


def test_a_classifier_is_not_trained_here(cell_config):
    with pytest.raises(ValueError, match="deit_b is not trained here: choose a detector"):
        train(cell_config("estimator=none", "finetuning=low_rank"))


def test_the_doctor_says_where_weights_come_from(cell_config):
    names = ("upernet_swin_b", "mask_rcnn_swin_b")
    published, own = (sources(n, instantiate(cell_config("profile=paper", f"model={n}").model.paper)) for n in names)
    assert re.search(r"SHA-256 that begins with 762e2178: https://\S+-762e2178\.pth", published)
    assert "experiments.train_dense model=upernet_swin_b task=ade20k" in published
    assert "It is not published: python -m experiments.train_dense model=mask_rcnn_swin_b task=coco" in own
