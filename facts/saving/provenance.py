"""Provenance of a network: its name, its repository and the file of its weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from facts.models import Recipe
from facts.models.weights import fetched, sha256
from facts.modules.networks import is_transformers
from facts.utils.hub import REPOSITORY


def provenance_of(model: nn.Module) -> dict[str, str] | None:
    """`name` and `repository` of a network, `source` and `sha256` of the file of its weights, as far as known."""
    if known := getattr(model, "provenance", None):  # of a network that was saved and loaded
        return known
    if recipe := getattr(model, "recipe", None):
        return _of_recipe(recipe)
    if is_transformers(model):
        return _of_transformers(model.config.name_or_path)
    published = getattr(model, "pretrained_cfg", {})
    return _of_timm(model, published) if published.get("architecture") else None


def _of_recipe(recipe: Recipe) -> dict[str, str]:
    published = recipe.weights == "pretrained" or Path(recipe.weights).is_dir()
    repository = {"repository": recipe.repository} if published else {}
    try:
        return {"name": recipe.name, **repository, **recipe.provenance()}
    except FileNotFoundError:  # the file was removed since
        return {"name": recipe.name, **repository, "source": Path(recipe.weights).name}


def _of_transformers(name: str) -> dict[str, str] | None:
    if REPOSITORY.fullmatch(name) and not Path(name).exists():
        return {"name": name, "repository": name}
    return {"name": Path(name).name} if name else None


def _of_timm(model: nn.Module, published: dict[str, Any]) -> dict[str, str]:
    """Compare the weights with the published ones, since timm does not record whether it read those."""
    tag = published.get("tag")
    name = f"{published['architecture']}.{tag}" if tag else published["architecture"]
    repository = published.get("hf_hub_id")
    path = fetched(repository) if repository else None
    if repository is None or path is None or not _holds(path, model):
        return {"name": published["architecture"]}
    return {"name": name, "repository": repository, "source": path.name, "sha256": sha256(path)}


def _holds(path: Path, model: nn.Module) -> bool:
    """Compare the largest weight that a network and a file have in common."""
    if path.suffix != ".safetensors":
        return False
    ours = model.state_dict()
    with safe_open(path, "pt") as file:
        common = sorted(ours.keys() & file.keys(), key=lambda name: ours[name].numel())
        return bool(common) and torch.equal(file.get_tensor(common[-1]).to(ours[common[-1]]), ours[common[-1]])
