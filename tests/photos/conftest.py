"""The network and the photos; without them these tests are skipped."""

import pytest

from tests.photos.data import (
    DATA,
    NETWORKS,
    PHOTOS,
    RESULTS,
    Setting,
    load_network,
    load_photos,
    weights_of,
)


def pytest_collection_modifyitems(items):
    here = [item for item in items if "tests/photos/" in item.path.as_posix()]
    for item in here:
        if not (all(weights_of(network).exists() for network in NETWORKS) and PHOTOS.exists()):
            item.add_marker(pytest.mark.skip(reason=f"no photos and weights in {DATA}"))


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """Where the ViT-Tiny's tables and figures go: a folder of the tests' unless told, so that the repository stays."""
    return RESULTS / "vit_tiny" if request.config.getoption("--write-results") else tmp_path_factory.mktemp("vit_tiny")


@pytest.fixture(scope="session")
def setting(tmp_path_factory):
    calibration = load_photos("calibration", resize=True, every=2)
    validation = load_photos("validation", resize=False)
    assert [sum(len(labels) for _, labels in split) for split in (calibration, validation)] == [500, 650]
    return Setting(load_network("vit_tiny"), calibration, validation, tmp_path_factory.mktemp("cache"))
