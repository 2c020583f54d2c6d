import pytest

import facts
from tests.saving.setting import compressed, from_recipe


@pytest.fixture
def saved(tmp_path):
    """A small network by recipe, compressed, and the folder it was saved in."""
    model, shape = from_recipe()
    result = compressed(model, shape)
    facts.save_compressed(result, tmp_path / "small")
    return result, tmp_path / "small"
