"""Skip these tests without the networks and the photos, and those that write results unless they are asked to."""

import pytest

from tests.photos.data import DATA, NETWORKS, PHOTOS, load_network, load_photos, weights_of


def pytest_collection_modifyitems(config, items):
    for item in (item for item in items if "tests/photos/" in item.path.as_posix()):
        if not (all(weights_of(network).exists() for network in NETWORKS) and PHOTOS.exists()):
            item.add_marker(pytest.mark.skip(reason=f"no photos and weights in {DATA}"))
        elif item.path.name != "test_paper_profile.py" and not config.getoption("--write-results"):
            item.add_marker(pytest.mark.skip(reason="takes ten minutes or more: only with --write-results"))


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    """The ViT-Tiny, 500 photos to calibrate on, 650 to judge by, and a cache for all tests."""
    calibration, validation = load_photos("calibration", every=2), load_photos("validation")
    assert [sum(len(labels) for _, labels in split) for split in (calibration, validation)] == [500, 650]
    return load_network("vit_tiny"), calibration, validation, tmp_path_factory.mktemp("cache")
