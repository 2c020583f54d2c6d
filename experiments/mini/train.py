"""Train the small networks of the `mini` profile: `python -m experiments.mini.train`.

Training keeps the weights of the last epoch: the test images select nothing. The classifiers have about 64 channels and
6 to 8 blocks; noise and training were chosen so that dense networks reach 85 to 95 % (docs/reproducing.md). Sizes were
chosen for the base networks, and the others follow; some train for a different number of epochs, to be as accurate.
Detectors and segmenters start from classifiers of coloured digits, by the last recipe of PELA's protocol. The language
model learns Python's reference; its size and number of epochs were chosen by its perplexity on other topics.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.progress import track
from torch import nn

from experiments.compose import CONF
from experiments.config import TASKS, how_to_install, missing_packages
from experiments.mini import CHECKPOINTS
from experiments.mini.coloured import ColouredDigits, load_coloured
from experiments.mini.digits import Digits, move
from experiments.mini.language import new_tokenizer
from experiments.train_dense import from_classifier, write_weights
from facts.finetuning import Finetuning, finetune
from facts.models import CausalLM, OpenMMLabModel, Recipe
from facts.models.from_transformers import write_processors
from facts.tasks.base import Task
from facts.tasks.classification.base import Batch
from facts.tasks.language import Language

FILES = [path for path in sorted((Path(CONF) / "model").glob("*.yaml")) if "mini" in OmegaConf.load(path)]
WITHIN = "experiments/mini/checkpoints"  # the start of the weights' paths in recipes
BATCH_SIZE, PEAK = 64, 3e-3  # PEAK is the highest learning rate
EPOCHS, EPOCHS_IN_COLOUR = 32, 60
OTHER_EPOCHS = {"swin_s": 48, "convnext_l": 16, "mambavision_l": 16}  # they learn more slowly, or faster
EPOCHS_OF_TEXT = 15
EXTRAS = {OpenMMLabModel: "detection", CausalLM: "llm"}


def mini_recipe(name: str, **overrides: str) -> Recipe:
    """Read the recipe under `mini` in the model's configuration."""
    return instantiate(OmegaConf.load(Path(CONF) / "model" / f"{name}.yaml").mini, _convert_="all", **overrides)


def mini_recipes() -> dict[str, Recipe]:
    """All small networks, classifiers first; classifiers that serve only as backbones are named after their files."""
    recipes = {path.stem: mini_recipe(path.stem) for path in FILES}
    dense = {name: recipe for name, recipe in recipes.items() if isinstance(recipe, OpenMMLabModel)}
    classifiers = [recipe.classifier for recipe in dense.values() if recipe.classifier]
    backbones = {Path(recipe.weights).stem: recipe for recipe in classifiers}
    return {name: recipe for name, recipe in recipes.items() if name not in dense} | backbones | dense


def epochs_of(model: nn.Module, num_epochs: int, seed: int) -> Iterator[list[Batch]]:
    """Yield each epoch's batches: noisy digits, or coloured ones, moved anew, for a network with three channels."""
    channels, _, side = model.pretrained_cfg["input_size"]
    if channels != 3:
        yield from (Digits(batch_size=BATCH_SIZE).training(model, epoch, seed) for epoch in range(num_epochs))
        return
    (images, labels), generator = load_coloured("train", side), torch.Generator().manual_seed(seed)
    for _ in range(num_epochs):
        order = torch.randperm(len(images), generator=generator)
        yield [
            (move(images[indices], math.radians(12), 0.1, 0.1, generator), labels[indices])
            for indices in order.split(BATCH_SIZE)
        ]


def train(model: nn.Module, num_epochs: int, seed: int) -> None:
    """Train in place, and leave the model in evaluation mode."""
    epochs = epochs_of(model, num_epochs, seed)
    first = next(epochs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.05)
    steps = num_epochs * len(first)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=steps, pct_start=0.1)
    model.train()
    for batches in track(chain([first], epochs), total=num_epochs, description=type(model).__name__):
        for inputs, targets in batches:
            loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()


def train_classifier(recipe: Recipe, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = replace(recipe, weights="random").build()
    for module in model.modules():
        if isinstance(module, nn.Linear):  # as PyTorch does by default: timm's spread is too small for narrow networks
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
    train(model, epochs, seed)
    return model.half().float()  # rounded as in its checkpoint


def top1_on_test(model: nn.Module) -> float:
    """Top-1 accuracy on test images, in percent."""
    task = ColouredDigits() if model.pretrained_cfg["input_size"][0] == 3 else Digits()
    return task.evaluate(model)["top1"]


def train_dense(name: str, recipe: OpenMMLabModel, seed: int) -> tuple[nn.Module, dict[str, float]]:
    """Train a detector or segmenter from its classifier, on scenes; return it with its metrics."""
    overrides = [f"task={TASKS[recipe.toolbox]}", f"finetuning=train_{name}", f"seed={seed}"]
    with initialize_config_dir(CONF, version_base="1.3"):
        config = compose("config", overrides=overrides)
    task: Task = instantiate(config.task.mini, _convert_="all")
    model = from_classifier(recipe, task, instantiate(config.finetuning.mini, _convert_="all"))
    return model, task.evaluate(model)


def train_language_model(recipe: CausalLM, seed: int) -> tuple[nn.Module, dict[str, float]]:
    """Train the language model and its tokenizer on Python's reference; return it with its metrics."""
    task: Language = instantiate(OmegaConf.load(Path(CONF) / "task" / "language.yaml").mini, seed=seed, batch_size=8)
    torch.manual_seed(seed)
    model = replace(recipe, weights="random").build()
    model.tokenizer = new_tokenizer(task.text("training"), model.config.vocab_size)
    schedule = Finetuning(
        num_epochs=EPOCHS_OF_TEXT, learning_rate=2e-3, weight_decay=0.1, alpha=0, clip_grad=1.0, seed=seed
    )
    finetune(model, model, task, schedule)
    return model, task.evaluate(model)


def main(arguments: list[str] | None = None) -> None:
    recipes = mini_recipes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(recipes), help=f"any of {', '.join(recipes)} (default: all)")
    parser.add_argument("--epochs", type=int, help="number for the classifiers (default: 16 to 48, in colour 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=CHECKPOINTS, help="where the checkpoints are written")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(recipes):
        parser.error(f"no small network called {', '.join(sorted(unknown))}: there are {', '.join(recipes)}")
    for name in options.names:
        recipe, start = recipes[name], time.perf_counter()
        extra = EXTRAS.get(type(recipe))
        if extra and (lacking := missing_packages(extra)):
            print(f"{name} is left out: {', '.join(lacking)} missing ({how_to_install(extra)})")
            continue
        path = options.folder / Path(recipe.weights).relative_to(WITHIN)
        path.parent.mkdir(exist_ok=True)
        if isinstance(recipe, CausalLM):
            model, metrics = train_language_model(recipe, options.seed)
            write_processors(model, path.parent)
        elif isinstance(recipe, OpenMMLabModel):
            model, metrics = train_dense(name, recipe, options.seed)
        else:
            usual = OTHER_EPOCHS.get(name, EPOCHS_IN_COLOUR if name.endswith("backbone") else EPOCHS)
            model = train_classifier(recipe, options.epochs or usual, options.seed)
            metrics = {"top1": top1_on_test(model)}
            model.half()
        write_weights(model, path)
        shown = ", ".join(f"{key} {value:.2f}" for key, value in metrics.items())
        print(f"{name}, on test data: {shown}; {time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
