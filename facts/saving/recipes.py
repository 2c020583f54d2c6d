"""Recipes of saved networks, from a network or from someone else's folder, and the provenance of weights."""

import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from timm.layers import DropPath
from timm.models import FeatureInfo
from torch import nn

from facts.models import OF_TRANSFORMERS, RECIPES, CausalLM, ImageTextModel, Recipe, TimmModel
from facts.models.builders import differing_options
from facts.models.weights import fetched, sha256
from facts.modules.networks import is_transformers
from facts.parts import descriptions, emptied
from facts.result import CompressionResult
from facts.saving.structure import layouts_of
from facts.utils.hub import REPOSITORY
from facts.utils.options import first_line

REMEDY = "pass the dense network as model="
MOST_LAYERS = 10_000
MOST_ENTRIES = 2**16  # such as class names
# Integers allowed: text models have vocabularies and periods of rotations; timm counts nothing from the end.
TEXT_SIZES = range(-(2**31), 2**31)
SIZES = {TimmModel.kind: range(2**16), CausalLM.kind: TEXT_SIZES, ImageTextModel.kind: TEXT_SIZES}
OTHER_SIZES = range(-(2**16), 2**16)
# Attributes and modules without effect on a loaded network, or that follow from its weights; dropout is not kept.
IRRELEVANT = re.compile("fused_attn|grad_checkpointing|training|.*drop.*")
DROPOUTS = (nn.Identity, nn.Dropout, DropPath)

log = logging.getLogger(__name__)


def recipe_of_result(result: CompressionResult) -> dict[str, Any] | None:
    """Describe a recipe that builds the network from JSON only; None if there is none."""
    model = result.model
    recipe = _own_recipe(model)
    if recipe is None:
        found = (kind.of(model) for kind in OF_TRANSFORMERS)
        recipe = next(filter(None, found), None) if is_transformers(model) else _timm_recipe(result)
    try:
        if recipe is None:
            raise ValueError(f"facts cannot build this {type(model).__name__} by itself from a name and options")
        recipe = recipe.portable()
        recipe.refuse_foreign()
        if _structure(_rebuilt(recipe, result))[1] != _structure(model)[1]:  # as after two compressions
            raise ValueError(f"the recipe of this {type(model).__name__} builds another network than was compressed")
    except ValueError as error:
        log.warning("%s: load it with facts.load_compressed(folder, model=the dense network)", error)
        return None
    return {"kind": recipe.kind, **{name: value for name, value in asdict(recipe).items() if name != "weights"}}


def _own_recipe(model: nn.Module) -> Recipe | None:
    recipe = getattr(model, "recipe", None)  # an attribute that a user's network may have in another sense
    return recipe if isinstance(recipe, Recipe) else None


def published_settings(model: nn.Module) -> dict[str, Any]:
    """Return the `pretrained_cfg` that timm notes in a network; nothing if that is another thing."""
    settings = getattr(model, "pretrained_cfg", None)
    return settings if isinstance(settings, dict) else {}


def _timm_recipe(result: CompressionResult) -> TimmModel | None:
    """Make a recipe from timm's name and the options seen in the network, if it builds the same network."""
    model = result.model
    tag = published_settings(model).get("architecture")
    if not isinstance(tag, str):
        return None
    features: Any = getattr(model, "feature_info", None)
    arguments: dict[str, Any] = {"num_classes": model.num_classes} if hasattr(model, "num_classes") else {}
    if isinstance(features, FeatureInfo):  # whose indices may count from the end
        levels = [index % len(features.info) for index in features.out_indices]
        arguments |= {"features_only": True, "out_indices": levels}
    try:
        with torch.device("meta"):
            arguments |= differing_options(model, build_recipe(TimmModel(tag=tag, arguments=arguments)))
        recipe = TimmModel(tag=tag, arguments=arguments, weights="random")
        return recipe if _structure(_rebuilt(recipe, result)) == _structure(model) else None
    except ValueError:  # the named network has other layers, or takes other options
        return None


def _rebuilt(recipe: Recipe, result: CompressionResult) -> nn.Module:
    """Build what loading the result by a recipe would give, without values. Raises `ValueError` if it cannot be."""
    with torch.device("meta"):
        dense, model = build_recipe(recipe), result.model
        return emptied(dense, result.summary.parts, result.plan, layouts_of(model), descriptions(model))


def _structure(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """Structure that distinguishes networks of the same name: classes and settings of modules, and shapes."""
    modules = {name: module for name, module in model.named_modules() if not isinstance(module, DROPOUTS)}
    shapes = {name: tensor.shape for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    settings = {
        f"{name}.{attribute}": value
        for name, module in modules.items()
        for attribute, value in vars(module).items()
        if isinstance(value, bool | int | float | str | tuple | list) and not IRRELEVANT.fullmatch(attribute)
    }
    return {name: type(module) for name, module in modules.items()}, shapes, settings


def read_recipe(fields: dict[str, Any] | None, path: Path) -> Recipe:
    """Make a manifest's recipe. Raises `ValueError` if it builds nothing, too much, or loads or runs anything else."""
    if fields is None:
        raise ValueError(f"{path} names no architecture that can be built from JSON; {REMEDY}")
    kind = fields.get("kind")
    if kind not in [*RECIPES]:
        raise ValueError(f"{path} is of kind {kind!r}, which this version cannot build; {REMEDY}")
    try:
        _refuse_excess(fields, SIZES.get(kind, OTHER_SIZES))
        arguments = {name: value for name, value in fields.items() if name != "kind"}
        recipe = RECIPES[kind](**{"weights": "random", **arguments})
        recipe.refuse_foreign()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is refused: {error}") from error
    return recipe


def _refuse_excess(value: Any, sizes: range, name: str = "recipe") -> None:
    """Raises `ValueError` for numbers and lists that no network has, before anything is built from them."""
    most = MOST_LAYERS if "layers" in name or "depth" in name else sizes[-1]
    if isinstance(value, int) and not sizes[0] <= value <= most:
        raise ValueError(f"{name} is {value}, which no network has")
    if isinstance(value, dict | list):
        if len(value) > MOST_ENTRIES:
            raise ValueError(f"{name} has {len(value):,} entries, too many for any network")
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_excess(each, sizes, f"{name}.{key}")


def build_recipe(recipe: Recipe) -> nn.Module:
    """Build the network of a recipe. Raises `ValueError` if its library cannot."""
    try:
        model = recipe.architecture()
    except ImportError:
        raise
    except Exception as error:  # libraries may raise anything on unexpected arguments
        raise ValueError(f"{recipe.name} cannot be built as it was saved: {first_line(error)}") from error
    model.recipe = recipe  # type: ignore[assignment]
    return model


def provenance_of(model: nn.Module) -> dict[str, str] | None:
    """Find a network's `name` and `repository`, and its weight file's `source` and `sha256`, as far as known."""
    known = getattr(model, "provenance", None)  # of a network that was saved and loaded
    if known and isinstance(known, dict) and all(isinstance(text, str) for text in (*known, *known.values())):
        return known
    if recipe := _own_recipe(model):
        published = recipe.weights == "pretrained" or Path(recipe.weights).is_dir()
        repository = recipe.repository if published else ""
        origin = {"name": recipe.name, **({"repository": repository} if repository else {})}
        try:
            return {**origin, **recipe.provenance()}
        except FileNotFoundError:  # the file has been removed since
            return {**origin, "source": Path(recipe.weights).name}
    if is_transformers(model):
        name = model.config.name_or_path
        published = bool(REPOSITORY.fullmatch(name)) and not Path(name).exists()
        return {"name": name, "repository": name} if published else {"name": Path(name).name} if name else None
    found = (published_settings(model).get(field) for field in ("architecture", "tag", "hf_hub_id"))
    name, tag, repository = (each if isinstance(each, str) else "" for each in found)
    path = fetched(repository) if name and repository else None
    if path is None or not _holds(path, model):
        return {"name": name} if name else None
    full_name = f"{name}.{tag}" if tag else name
    return {"name": full_name, "repository": repository, "source": path.name, "sha256": sha256(path)}


def _holds(path: Path, model: nn.Module) -> bool:
    """Compare the largest weight that a network and a file share, since timm does not record if the file was read."""
    if path.suffix != ".safetensors":
        return False
    ours = model.state_dict()
    with safe_open(path, "pt") as file:
        common = sorted(ours.keys() & file.keys(), key=lambda name: ours[name].numel())
        return bool(common) and torch.equal(file.get_tensor(common[-1]).to(ours[common[-1]]), ours[common[-1]])
