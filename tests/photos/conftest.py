"""The network and the photos; without them these tests are skipped."""

import pytest
import timm
from safetensors.torch import load_file

from tests.photos.data import DATA, PHOTOS, RESULTS, WEIGHTS, Setting, load_photos


def pytest_collection_modifyitems(items):
    here = [item for item in items if "tests/photos/" in item.path.as_posix()]
    for item in here:
        if not (WEIGHTS.exists() and PHOTOS.exists()):
            item.add_marker(pytest.mark.skip(reason=f"no photos and weights in {DATA}"))


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """Where tables and figures go: a folder of the tests', so that they leave the repository as it was, unless told."""
    return RESULTS if request.config.getoption("--write-results") else tmp_path_factory.mktemp("vit_tiny")


@pytest.fixture(scope="session")
def setting(tmp_path_factory):
    model = timm.create_model("vit_tiny_patch16_224").eval()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(WEIGHTS).items()}, strict=True)
    calibration = load_photos("calibration", resize=True, every=2)
    validation = load_photos("validation", resize=False)
    assert [sum(len(labels) for _, labels in split) for split in (calibration, validation)] == [500, 650]
    return Setting(model, calibration, validation, tmp_path_factory.mktemp("cache"))
