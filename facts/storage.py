"""A compressed network as a folder of JSON and safetensors: nothing in it is code."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from facts.compression import CompressionResult, Summary
from facts.cost import Cost
from facts.files import replacing, writable_folder
from facts.lowrank import LowRankLinear
from facts.models import RECIPES, Recipe, TimmModel
from facts.models.causal_lm import read_beside, recipe_of, write_beside
from facts.networks import is_transformers, with_linear_layers

WEIGHTS, DESCRIPTION = "model.safetensors", "compression.json"


def save_compressed(result: CompressionResult, folder: Path | str) -> None:
    """Write `model.safetensors` and `compression.json` (recipe, plan, summary) into `folder`.

    Beside a language model go its generation settings and its tokenizer, if it has one as `.tokenizer`.
    The recipe is the one the model was built by, or timm's name of it where that rebuilds the same shapes; without
    either the folder can be loaded only onto a given network.
    """
    folder = writable_folder(Path(folder))
    description = {
        "recipe": _describe(_recipe_of(result.model)),
        "dtype": str(next(result.model.parameters()).dtype).removeprefix("torch."),
        "plan": result.plan,
        "summary": asdict(result.summary),
    }
    with replacing(folder / WEIGHTS) as path:
        save_model(result.model, path)
    if is_transformers(result.model):
        write_beside(result.model, folder)
    with replacing(folder / DESCRIPTION) as path:
        path.write_text(json.dumps(description, indent=1))


def load_compressed(folder: Path | str, model: nn.Module | None = None) -> CompressionResult:
    """Read what `save_compressed` wrote, on the CPU and in evaluation mode.

    `model` is the dense network, for a folder without a recipe; it is changed in place. Raises `FileNotFoundError` or
    `ValueError` where the folder is not whole or does not fit.
    """
    folder = Path(folder)
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        recipe, plan, summary = description["recipe"], dict(description["plan"]), dict(description["summary"])
        summary["before"], summary["after"] = Cost(**summary["before"]), Cost(**summary["after"])
        summary = Summary(**summary)
        dtype = getattr(torch, description["dtype"])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder} holds no {DESCRIPTION}; give a folder that save_compressed wrote") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / DESCRIPTION} is damaged ({error}); save the model again") from error
    model = _rebuild(recipe, folder) if model is None else with_linear_layers(model)
    _cast(model, dtype)
    try:
        for name, rank in plan.items():
            if rank is not None:
                dense = model.get_submodule(name)
                left = dense.weight.new_empty(dense.out_features, rank)
                right = dense.weight.new_empty(rank, dense.in_features)
                model.set_submodule(name, LowRankLinear(left, right, dense.bias))
    except AttributeError as error:
        raise ValueError(f"{folder} was saved from another network than {type(model).__name__}: {error}") from error
    try:
        load_model(model, folder / WEIGHTS)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged or of another network: {error}") from error
    if is_transformers(model):
        read_beside(model, folder)
    return CompressionResult(model.eval(), plan, summary)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """To the type of the file's tensors; buffers that are in no file, such as rotations, keep their own."""
    computed = {name: buffer for name, buffer in model.named_buffers() if name not in model.state_dict()}
    model.to(dtype)
    for name, buffer in computed.items():
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, buffer)


def _recipe_of(model: nn.Module) -> Recipe | None:
    if recipe := getattr(model, "recipe", None):
        return recipe
    if is_transformers(model):
        return recipe_of(model)
    tag = getattr(model, "pretrained_cfg", {}).get("architecture")
    if tag is None:
        return None
    candidate = TimmModel(tag=tag, arguments={"num_classes": model.num_classes})
    with torch.device("meta"):
        return candidate if _dense_shapes(candidate.architecture()) == _dense_shapes(model) else None


def _dense_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Parameter shapes, with each low-rank layer as the dense one it stands for."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, LowRankLinear):
            del shapes[f"{name}.left"], shapes[f"{name}.right"]
            shapes[f"{name}.weight"] = torch.Size((module.out_features, module.in_features))
    return shapes


def _describe(recipe: Recipe | None) -> dict | None:
    return recipe and {"kind": recipe.kind, **asdict(recipe), "weights": "random"}


def _rebuild(description: dict | None, folder: Path) -> nn.Module:
    if description is None:
        raise ValueError(
            f"{folder} names no architecture that can be built from JSON; pass the dense network as model="
        )
    fields = dict(description)
    kind = fields.pop("kind", None)
    if kind not in RECIPES:
        raise ValueError(f"{folder} was saved for {kind!r}, which this version cannot build; pass model=")
    try:
        recipe = RECIPES[kind](**fields)
        model = recipe.architecture()
        model.recipe = recipe
        return model
    except ValidationError as error:
        raise ValueError(f"{folder / DESCRIPTION} is damaged: {error}") from error
