import pytest

from experiments.train_mini import mini_recipes, top1_on_test
from facts.models import CausalLM, OpenMMLabModel
from facts.models.weights import CHECKPOINTS

RECIPES = mini_recipes()
# Those that only a detector or segmenter begins with see the digits in colour.
CLASSIFIERS = {
    name: 80 if name.endswith("backbone") else 96
    for name, recipe in RECIPES.items()
    if not isinstance(recipe, CausalLM | OpenMMLabModel)
}


@pytest.mark.parametrize(("name", "least"), CLASSIFIERS.items())
def test_shipped_networks_classify_the_test_digits(name, least):
    assert top1_on_test(RECIPES[name].build()) >= least


def test_every_shipped_checkpoint_is_one_models():
    shipped = [str(path.relative_to(CHECKPOINTS)) for path in CHECKPOINTS.rglob("*.safetensors")]
    assert sorted(recipe.weights for recipe in RECIPES.values()) == sorted(shipped)


def test_shipped_checkpoints_are_small():
    sizes = {name: (CHECKPOINTS / recipe.weights).stat().st_size for name, recipe in RECIPES.items()}
    assert max(sizes.values()) < 8e6
    assert sum(sizes.values()) < 40e6
