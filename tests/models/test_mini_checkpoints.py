import pytest

from experiments.train_mini import NAMES, mini_recipe, top1_on_test
from facts.models.weights import CHECKPOINTS


@pytest.mark.parametrize("name", NAMES)
def test_shipped_networks_classify_the_test_digits(name):
    assert top1_on_test(mini_recipe(name).build()) >= 96


def test_every_shipped_checkpoint_is_one_models():
    assert sorted(mini_recipe(name).weights for name in NAMES) == sorted(path.name for path in CHECKPOINTS.iterdir())


def test_shipped_checkpoints_are_small():
    sizes = [(CHECKPOINTS / mini_recipe(name).weights).stat().st_size for name in NAMES]
    assert sum(sizes) < 12e6
