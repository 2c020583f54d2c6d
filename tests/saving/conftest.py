import pytest

import facts
from tests.networks import make_image_classifier
from tests.saving.setting import compressed, compressed_units, from_recipe, saved_vit


@pytest.fixture(scope="session")
def result():
    """A small network by recipe, compressed."""
    return compressed(*from_recipe())


@pytest.fixture
def saved(result, tmp_path):
    """The network, and the folder it was saved in."""
    facts.save_compressed(result, tmp_path / "small")
    return result, tmp_path / "small"


@pytest.fixture(scope="session")
def units():
    """A small network of narrower units; the heads of attention have two widths."""
    return compressed_units("cors_fisher")


@pytest.fixture(scope="session")
def originals(units, tmp_path_factory):
    """Folders of saved networks, to be copied."""
    place = tmp_path_factory.mktemp("originals")
    facts.save_compressed(compressed(make_image_classifier(), (3, 32, 32)), place / "classifier")
    facts.save_compressed(units, place / "units")
    return {"vit": saved_vit(place / "vit"), "classifier": place / "classifier", "units": place / "units"}
