"""The digits, in colour too, and the small networks that ship with the experiments, and their training."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.mini import CHECKPOINTS
from experiments.mini.coloured import ColouredDigits, FewColouredDigits, split_indices
from experiments.mini.digits import NUM_CLASSES, Digits, draw_digits
from experiments.mini.train import WITHIN, main, mini_recipe, mini_recipes, top1_on_test
from facts.models import CausalLM, OpenMMLabModel

NETWORK, IN_COLOUR = nn.Identity(), nn.Identity()
NETWORK.pretrained_cfg, IN_COLOUR.pretrained_cfg = {"input_size": (1, 16, 16)}, {"input_size": (3, 32, 32)}
RECIPES = mini_recipes()
# Classifiers that are only backbones see ten digits in colour; the others tell a hundred apart.
NAMES = [name for name, recipe in RECIPES.items() if not isinstance(recipe, CausalLM | OpenMMLabModel)]
CLASSIFIERS = {name: (80, 100) if name.endswith("backbone") else (85, 95) for name in NAMES}


def together(batches):
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return images.flatten(1), labels


def test_a_shorter_part_of_a_stream_is_the_beginning_of_a_longer_one_in_balanced_blocks():
    more_images, more_labels = draw_digits("one", 500)
    for count in (1, 200, 201, 399):
        images, labels = draw_digits("one", count)
        assert images.shape == (count, 1, 16, 16) and labels.shape == (count,)
        assert images.equal(more_images[:count]) and labels.equal(more_labels[:count])
    assert all(torch.bincount(block).tolist() == [2] * NUM_CLASSES for block in more_labels[:400].split(200))
    assert not more_labels[:200].equal(more_labels[200:400])
    reduced = F.adaptive_avg_pool2d(draw_digits("one", 200, 64)[0], 16)
    nearest = torch.cdist(reduced.flatten(1), more_images[:200].flatten(1)).argmin(dim=1)
    assert nearest.tolist() == list(range(200))  # a larger side shows the same images


def test_no_image_is_in_two_parts_of_the_task():
    """Noise alone sets two views of a digit about 0.6 * (2 * 256) ** 0.5 = 13.6 apart."""
    task = Digits(num_calibration=1000, num_training=1000)
    epochs = [task.training(NETWORK, *numbers) for numbers in ((0,), (1,), (0, 1))]
    parts = [task.calibration(NETWORK), task.sensitivity(NETWORK), task.evaluation(NETWORK), *epochs]
    images, _ = together([batch for part in parts for batch in part])
    assert len(images) == 1000 + 128 + 3000 + 3 * 1000
    assert torch.cdist(images, images).fill_diagonal_(torch.inf).min() > 5
    assert together(task.training(NETWORK, 0))[0].equal(together(epochs[0])[0])


def test_another_seed_draws_other_images_for_methods_and_the_same_for_tests():
    first, second = Digits(num_calibration=64), Digits(num_calibration=64, seed=1)
    for part in ("calibration", "sensitivity", "evaluation"):
        images = [together(getattr(task, part)(NETWORK))[0] for task in (first, second)]
        assert images[0].equal(images[1]) == (part == "evaluation")
    assert first.content_key(NETWORK) != second.content_key(NETWORK)


def test_coloured_digits_are_divided_without_overlap():
    training, test = split_indices("train"), split_indices("test")
    assert test.tolist() == list(range(0, 1797, 3)) and sorted([*training.tolist(), *test.tolist()]) == [*range(1797)]
    task = ColouredDigits(num_calibration=1000)
    parts = (getattr(task, part)(IN_COLOUR) for part in ("calibration", "sensitivity", "evaluation"))
    calibration, *others = (together(batches)[0] for batches in parts)
    assert [len(part) for part in (calibration, *others)] == [1000, 128, 599]
    assert all(torch.cdist(part, calibration).min() > 0 for part in others)
    first, second = (together(task.training(IN_COLOUR, epoch))[1] for epoch in (0, 1))
    assert first.bincount().equal(second.bincount()) and not first.equal(second)
    few = FewColouredDigits(num_factors_per_class=2, num_held_out_per_class=1)  # as in conf/task/digits.yaml
    assert len(together(few.evaluation(IN_COLOUR))[0]) == 64
    assert [len(together(batches)[0]) for batches in few.analysis(IN_COLOUR)] == [20, 10]


@pytest.mark.system
@pytest.mark.parametrize(("name", "bounds"), CLASSIFIERS.items())
def test_shipped_networks_classify_digits_but_not_all_of_them(name, bounds):
    """Without errors, methods could not be told apart."""
    assert bounds[0] <= top1_on_test(RECIPES[name].build()) <= bounds[1]


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
