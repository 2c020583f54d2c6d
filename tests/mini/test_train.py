"""The small networks that ship with the experiments, and their training."""

from functools import partial

import pytest

from experiments.mini import CHECKPOINTS
from experiments.mini.digits import Digits
from experiments.mini.train import WITHIN, main, mini_recipe, mini_recipes, top1_on_test
from facts.models import CausalLM, OpenMMLabModel

RECIPES = mini_recipes()
# Classifiers that are only backbones see ten digits in colour; the others tell a hundred apart.
CLASSIFIERS = {
    name: (80, 100) if name.endswith("backbone") else (85, 95)
    for name, recipe in RECIPES.items()
    if not isinstance(recipe, CausalLM | OpenMMLabModel)
}


@pytest.mark.system
@pytest.mark.parametrize(("name", "bounds"), CLASSIFIERS.items())
def test_shipped_networks_classify_digits_but_not_all_of_them(name, bounds):
    """Without errors, methods could not be told apart."""
    least, most = bounds
    assert least <= top1_on_test(RECIPES[name].build()) <= most


def test_every_shipped_checkpoint_is_one_models_and_small():
    shipped = {f"{WITHIN}/{path.relative_to(CHECKPOINTS)}": path for path in CHECKPOINTS.rglob("*.safetensors")}
    assert sorted(recipe.weights for recipe in RECIPES.values()) == sorted(shipped)
    sizes = [path.stat().st_size for path in shipped.values()]
    assert max(sizes) < 8e6 and sum(sizes) < 42e6


@pytest.mark.system
def test_the_command_writes_a_checkpoint_that_loads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.mini.train.Digits", partial(Digits, num_training=128))
    main(["deit_b", "--epochs", "1", "--folder", str(tmp_path)])
    assert "top1" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mini_deit.safetensors"]
    mini_recipe("deit_b", weights=str(tmp_path / "mini_deit.safetensors")).build()
