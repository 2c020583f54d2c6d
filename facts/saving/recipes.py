"""Recipes of saved networks: written from a network, and read from a folder that somebody else may have made."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from facts.models import RECIPES, CausalLM, ImageClassifier, Recipe, TimmModel
from facts.models.from_transformers import LABELS
from facts.models.timm_options import differing_options
from facts.modules.networks import is_transformers
from facts.modules.quantized import quantization_of
from facts.result import CompressionResult
from facts.saving.manifest import first_fault
from facts.saving.plans import layouts_of, with_plan

REMEDY = "pass the dense network as model=, or its function as architecture="
log = logging.getLogger(__name__)

MOST_LAYERS = 10_000  # and entries of a list
MOST_CLASSES = 2**16  # that have names
# Integers that a network may have. Text models have vocabularies and periods of rotations; timm counts nothing from
# the end.
SIZES = {TimmModel.kind: range(2**16), CausalLM.kind: range(-(2**31), 2**31)}
OTHER_SIZES = range(-(2**16), 2**16)
IRRELEVANT = {"fused_attn", "grad_checkpointing", "training"}  # attributes without effect on a loaded network


def recipe_of_result(result: CompressionResult) -> Recipe | None:
    """Find a recipe that builds the network from JSON alone; None if there is none."""
    model = result.model
    recipe = getattr(model, "recipe", None) or _transformers_recipe(model) or _timm_recipe(result)
    try:
        if recipe is None:
            raise ValueError(f"nothing known here builds this {type(model).__name__}")
        recipe = recipe.portable()
        recipe.refuse_foreign()
    except ValueError as error:
        log.warning("the saved network will have to be loaded onto a given one, as model=: %s", error)
        return None
    return recipe


def _transformers_recipe(model: nn.Module) -> Recipe | None:
    return (CausalLM.of(model) or ImageClassifier.of(model)) if is_transformers(model) else None


def _timm_recipe(result: CompressionResult) -> TimmModel | None:
    """Make a recipe of timm's name and the options that the network shows, if it builds the same network."""
    model = result.model
    tag = getattr(model, "pretrained_cfg", {}).get("architecture")
    if tag is None:
        return None
    arguments: dict[str, Any] = {"num_classes": model.num_classes}
    try:
        with torch.device("meta"):
            arguments |= differing_options(model, build_recipe(TimmModel(tag=tag, arguments=arguments)))
            recipe = TimmModel(tag=tag, arguments=arguments, weights="random")
            rebuilt = with_plan(build_recipe(recipe), result.plan, layouts_of(model), quantization_of(model))
    except ValueError:  # the named network has other layers, or takes other options
        return None
    return recipe if _structure(rebuilt) == _structure(model) else None


def _structure(model: nn.Module) -> tuple[str, dict[str, torch.Size], dict[tuple[str, str], Any]]:
    """Structure that distinguishes networks of one name: their text, their shapes, and their modules' settings."""
    shapes = {name: tensor.shape for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    settings = {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, bool | int | float | str | tuple | list) and attribute not in IRRELEVANT
    }
    return repr(model), shapes, settings


def describe_recipe(recipe: Recipe | None) -> dict[str, Any] | None:
    """Describe a portable recipe, whose weights are the saved ones; None for none."""
    if recipe is None:
        return None
    return {"kind": recipe.kind, **{name: value for name, value in asdict(recipe).items() if name != "weights"}}


def read_recipe(fields: dict[str, Any] | None, path: Path) -> Recipe:
    if fields is None:
        raise ValueError(f"{path} names no architecture that can be built from JSON; {REMEDY}")
    kind = fields.get("kind")
    if kind not in [*RECIPES]:
        raise ValueError(f"{path} is of {kind!r}, which this version cannot build; {REMEDY}")
    _refuse_excess(fields, path, SIZES.get(kind, OTHER_SIZES))
    try:
        arguments = {name: value for name, value in fields.items() if name != "kind"}
        recipe = RECIPES[kind](**{"weights": "random", **arguments})
        recipe.refuse_foreign()
    except ValidationError as error:
        raise ValueError(f"{path} is refused: {first_fault(error)}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is refused: {error}") from error
    return recipe


def _refuse_excess(value: Any, path: Path, sizes: range, name: str = "recipe") -> None:
    """Raises `ValueError` for numbers and lists that no network has, before anything is built from them."""
    most = MOST_LAYERS if "layers" in name or "depth" in name else sizes[-1]
    if isinstance(value, int) and not sizes[0] <= value <= most:
        raise ValueError(f"{path} is refused: {name} is {value}, which no network has")
    if isinstance(value, dict | list):
        if len(value) > (MOST_CLASSES if name.endswith(LABELS) else MOST_LAYERS):
            raise ValueError(f"{path} is refused: {name} has {len(value):,} entries, too many for any network")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            _refuse_excess(each, path, sizes, f"{name}.{key}")


def build_recipe(recipe: Recipe) -> nn.Module:
    try:
        model = recipe.architecture()
    except ImportError:
        raise
    except Exception as error:  # libraries may raise anything on unexpected arguments
        reason = str(error).partition("\n")[0]  # PyTorch adds the signatures that would fit
        raise ValueError(f"{recipe.name} cannot be built as it was saved: {reason}") from error
    model.recipe = recipe  # type: ignore[assignment]
    return model
