import pytest

from experiments.train_mini import mini_recipes, participation, top1_on_test
from facts.models import CausalLM, OpenMMLabModel
from facts.models.weights import CHECKPOINTS

RECIPES = mini_recipes()
# Those that only a detector or segmenter begins with see ten digits in colour; the others tell a hundred apart.
CLASSIFIERS = {
    name: (80, 100) if name.endswith("backbone") else (85, 95)
    for name, recipe in RECIPES.items()
    if not isinstance(recipe, CausalLM | OpenMMLabModel)
}


@pytest.mark.system
@pytest.mark.parametrize(("name", "bounds"), CLASSIFIERS.items())
def test_shipped_networks_classify_digits_but_not_all_of_them(name, bounds):
    """Without an error there would be nothing to lose, and methods could not be told apart."""
    least, most = bounds
    assert least <= top1_on_test(RECIPES[name].build()) <= most


@pytest.mark.system
@pytest.mark.parametrize("name", ["deit_b", "swin_b", "convnext_b", "mambavision_b"])
def test_every_image_has_something_to_say(name):
    """Networks that knew their calibration images by heart had a hundredth."""
    assert participation(RECIPES[name].build()) > 0.1


def test_every_shipped_checkpoint_is_one_models():
    shipped = [str(path.relative_to(CHECKPOINTS)) for path in CHECKPOINTS.rglob("*.safetensors")]
    assert sorted(recipe.weights for recipe in RECIPES.values()) == sorted(shipped)


def test_shipped_checkpoints_are_small():
    sizes = {name: (CHECKPOINTS / recipe.weights).stat().st_size for name, recipe in RECIPES.items()}
    assert max(sizes.values()) < 8e6
    assert sum(sizes.values()) < 42e6
