import pytest

import facts
from tests.networks import make_image_classifier
from tests.saving.setting import compressed, compressed_units, from_recipe


@pytest.fixture(scope="session")
def result():
    return compressed(*from_recipe())


@pytest.fixture
def saved(result, tmp_path):
    facts.save_compressed(result, tmp_path / "small")
    return result, tmp_path / "small"


@pytest.fixture(scope="session")
def units():
    """A small network of narrower units; the heads of attention have two widths."""
    return compressed_units("cors_fisher")


@pytest.fixture(scope="session")
def originals(units, tmp_path_factory):
    classifier = compressed(make_image_classifier(), (3, 32, 32))
    place, saved = tmp_path_factory.mktemp("originals"), {"classifier": classifier, "units": units}
    for name, result in (saved | {"vit": compressed(*from_recipe(depth=1))}).items():
        facts.save_compressed(result, place / name)
    return {path.name: path for path in place.iterdir()}
