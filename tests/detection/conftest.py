"""The small networks with weights drawn at random, and the scenes, which tests share."""

from pathlib import Path

import pytest

from experiments.mini.train import mini_recipe


@pytest.fixture(scope="session")
def scenes(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scenes")


@pytest.fixture(scope="session")
def few_scenes(tmp_path_factory) -> Path:
    """With fewer images, for whole epochs."""
    from experiments.mini import scenes

    folder = tmp_path_factory.mktemp("few_scenes")
    scenes.scenes.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "NUM_SCENES", {"train": 160, "test": 40})
        scenes.write_coco(folder / "coco")
        scenes.write_ade20k(folder / "ade20k")
    scenes.scenes.cache_clear()
    return folder


SMALL = {"num_calibration": 16, "batch_size": 4, "augmentation": "none", "num_workers": 0, "input_size": 64}


@pytest.fixture(scope="session")
def detection(scenes):
    from experiments.mini.scenes import DigitDetection

    return DigitDetection(root=str(scenes / "coco"), scale=(64, 64), **SMALL)


@pytest.fixture(scope="session")
def segmentation(scenes):
    from experiments.mini.scenes import DigitSegmentation

    return DigitSegmentation(root=str(scenes / "ade20k"), scale=(64, 64), crop=64, **SMALL)


@pytest.fixture(scope="session")
def detector():
    return mini_recipe("mask_rcnn_swin_b").build()


@pytest.fixture(scope="session")
def segmenters():
    return {name: mini_recipe(name).build() for name in ("upernet_swin_b", "upernet_deit_b")}
