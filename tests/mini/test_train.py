"""The small networks that ship with the experiments, and their training."""

from functools import partial

import pytest
import torch

from experiments.mini import CHECKPOINTS
from experiments.mini.digits import Digits
from experiments.mini.train import WITHIN, epochs_for, main, mini_recipe, mini_recipes, top1_on_test, train
from facts.models import CausalLM, OpenMMLabModel
from tests.mini.test_digits import network_of

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


@pytest.fixture
def short_epochs(monkeypatch):
    monkeypatch.setattr("experiments.mini.train.Digits", partial(Digits, num_training=128))


def test_networks_of_three_channels_see_each_coloured_digit_once_an_epoch_moved_differently(monkeypatch):
    images, labels = torch.rand(10, 3, 32, 32), torch.arange(10)
    monkeypatch.setattr("experiments.mini.train.load_coloured", lambda split, side: (images, labels))
    batches_of, seen = epochs_for(network_of(3, 32, 32), seed=0, batch_size=4), []
    for number in range(2):
        moved, order = (torch.cat(parts) for parts in zip(*batches_of(number), strict=True))
        assert sorted(order.tolist()) == list(range(10))
        seen.append(moved[order.argsort()])
    assert not any(one.allclose(other, atol=0.1) for one, other in zip(*seen, strict=True))


def test_training_lowers_the_loss(short_epochs):
    model = mini_recipe("convnext_b", weights="random").build()
    losses = train(model, epochs=3)
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert not model.training


@pytest.mark.system
def test_the_command_writes_a_checkpoint_that_loads(short_epochs, tmp_path, capsys):
    main(["deit_b", "--epochs", "1", "--folder", str(tmp_path)])
    assert "top1" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mini_deit.safetensors"]
    mini_recipe("deit_b", weights=str(tmp_path / "mini_deit.safetensors")).build()


def test_unknown_names_are_refused_and_detectors_left_out_without_the_extra(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        main(["resnet"])
    message = capsys.readouterr().err
    assert all(name in message for name in RECIPES)
    monkeypatch.setattr("experiments.mini.train.missing_packages", lambda extra: ["mmdet"])
    main(["mask_rcnn_swin_b", "--folder", str(tmp_path)])
    assert "mask_rcnn_swin_b is left out: mmdet missing (make install-detection)" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
