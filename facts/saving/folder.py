"""A compressed network as a folder of JSON and safetensors: nothing in it is code."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from facts.compression.result import CompressionResult
from facts.models import RECIPES, Recipe, TimmModel
from facts.models.causal_lm import read_beside, recipe_of, write_beside
from facts.models.timm_options import options_beside
from facts.models.weights import refuse_misfits, sha256
from facts.modules.linear_calls import replace_submodule, skeleton, with_linear_layers
from facts.modules.lowrank import LowRankLinear
from facts.modules.networks import is_transformers
from facts.modules.pointwise import is_pointwise
from facts.saving.manifest import MANIFEST, WEIGHTS, Manifest, Metrics, checked_metrics, first_fault, versions
from facts.saving.model_card import write_card
from facts.saving.provenance import provenance_of
from facts.saving.validation import bounded_parameters, refuse_what_is_not_data
from facts.search import Plan
from facts.utils.files import replacing, writable_folder
from facts.utils.hub import REPOSITORY, pulled

log = logging.getLogger(__name__)

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IRRELEVANT = {"fused_attn", "grad_checkpointing", "training"}  # attributes that change no output of a loaded network
DENSE_PER_SAVED = 16  # many more parameters than any network registers for each tensor of its file


class SavedTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # safetensors' name of it


def save_compressed(result: CompressionResult, folder: Path | str, metrics: Metrics | None = None) -> None:
    """Write `model.safetensors`, `compression.json` (recipe, plan, summary, origin) and `README.md` into `folder`.

    Beside a language model go its generation settings and its tokenizer, if it has one as `.tokenizer`.
    The recipe is the one the model was built by, or timm's name of it and the options that it shows, where these
    rebuild the same network; without either, which a warning tells, the folder can be loaded only onto a given network.
    `metrics` are figures that were measured: `{"top1": {"original": 72.1, "compressed": 70.3}}`; the model card,
    `README.md`, shows them. A card that was changed stays as it is. Killed in between, this leaves a folder that is
    refused, never one of another network.
    """
    metrics = checked_metrics(metrics)
    folder = writable_folder(Path(folder))
    model = result.model
    with replacing(folder / WEIGHTS) as path:
        save_model(model, str(path))
    if is_transformers(model):
        write_beside(model, folder)
    description = Manifest(
        recipe=_describe(_recipe_of(result)),
        plan=result.plan,
        fingerprint=sha256(folder / WEIGHTS),
        versions=versions(model),
        summary=result.summary,
        skipped=result.skipped,
        base_model=provenance_of(model),
        metrics=metrics,
        buffers=_types_of_buffers(model),
    )
    with replacing(folder / MANIFEST) as path:
        path.write_text(description.text())
    write_card(folder, folder.resolve().name)


def load_compressed(
    source: Path | str, model: nn.Module | None = None, *, revision: str | None = None, token: str | None = None
) -> CompressionResult:
    """Read what `save_compressed` wrote, on the CPU and in evaluation mode.

    `source` is a folder, or a repository `OWNER/NAME` at Hugging Face, of which `revision` names a branch, tag or
    commit and `token` opens a private one. `model` is the dense network, for a source without a recipe; its tensors are
    taken over. Nothing but data is read: raises `FileNotFoundError` or `ValueError`, before anything is built, where
    the folder is not whole, holds a pickle or other code, leads elsewhere, or does not fit.
    """
    folder = _folder(source, revision, token)
    refuse_what_is_not_data(folder)
    description = Manifest.read(folder)
    _refuse_other_weights(folder / WEIGHTS, description.fingerprint)
    tensors = _header(folder / WEIGHTS)
    if model is None:
        recipe = _recipe(description.recipe, folder / MANIFEST)
        with torch.device("meta"), bounded_parameters(DENSE_PER_SAVED * len(tensors)):
            sketch = _built(recipe)
    else:
        sketch = skeleton(model)
    refuse_misfits(_misfits(_planned(sketch, description.plan), tensors), sketch, folder / WEIGHTS)
    if model is None:
        model = _built(recipe)
    model = _planned(model, description.plan)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tensors and tensors[name].dtype in FLOATS:
            tensor.data = tensor.data.to(FLOATS[tensors[name].dtype])
    for name, buffer in _unsaved_buffers(model).items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(FLOATS[description.buffers.get(name, "F32")]))
    load_model(model, folder / WEIGHTS)
    if is_transformers(model):
        read_beside(model, folder)
    model.origin = description.base_model  # type: ignore[assignment]
    return CompressionResult(model.eval(), description.plan, description.summary, description.skipped)


def _folder(source: Path | str, revision: str | None, token: str | None) -> Path:
    if revision is None and Path(source).is_dir():
        return Path(source)
    if REPOSITORY.fullmatch(str(source)):
        try:
            return pulled(str(source), revision, token)
        except (ConnectionError, FileNotFoundError, PermissionError) as error:
            raise type(error)(f"no folder {source} is here, and {error}") from error
    raise FileNotFoundError(f"{source} is no folder: give one that save_compressed wrote, or a repository OWNER/NAME")


def _refuse_other_weights(path: Path, fingerprint: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: save or fetch the network again")
    if sha256(path) != fingerprint:
        raise ValueError(
            f"{path} is not the file that {MANIFEST} describes (other SHA-256): it was cut short, or only one of "
            "the two was replaced; save or fetch both again"
        )


def _recipe(fields: dict[str, Any] | None, path: Path) -> Recipe:
    if fields is None:
        raise ValueError(f"{path} names no architecture that can be built from JSON; pass the dense network as model=")
    kind = fields.get("kind")
    if kind not in [*RECIPES]:
        raise ValueError(f"{path} is of {kind!r}, which this version cannot build; pass the dense network as model=")
    try:
        recipe = RECIPES[kind](**{name: value for name, value in fields.items() if name != "kind"})
        recipe.refuse_foreign()
    except ValidationError as error:
        raise ValueError(f"{path} is refused: {first_fault(error)}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is refused: {error}") from error
    return recipe


def _built(recipe: Recipe) -> nn.Module:
    try:
        model = recipe.architecture()
    except ImportError:
        raise
    except Exception as error:  # libraries fail in any way on arguments that they did not expect
        raise ValueError(f"{recipe.name} cannot be built as it was saved: {error}") from error
    model.recipe = recipe  # type: ignore[assignment]
    return model


def _planned(dense: nn.Module, plan: Plan) -> nn.Module:
    """The network with empty low-rank layers as planned, 1x1 convolutions among them, under all names of each layer.

    Raises `ValueError` for a layer that is not there or not linear, and for a rank that it cannot have.
    """
    modules = dict(dense.named_modules())
    convolutions = {name.removesuffix(".linear") for name in plan if name.endswith(".linear")}
    convolutions = {name for name in convolutions if name in modules and is_pointwise(modules[name])}
    model = with_linear_layers(dense, [name for name in convolutions if plan[f"{name}.linear"] is not None])
    modules = dict(model.named_modules())
    for name, rank in plan.items():
        if name.removesuffix(".linear") in convolutions and rank is None:
            continue
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            found = "there is none of that name" if layer is None else f"it is of type {type(layer).__name__}"
            raise ValueError(
                f"the plan does not fit this {type(model).__name__}: {name!r} is no linear layer ({found}); load the "
                "network that was compressed"
            )
        largest = min(layer.in_features, layer.out_features)
        if rank is not None and rank > largest:
            raise ValueError(
                f"the plan does not fit this {type(model).__name__}: rank {rank} of {name!r}, which is "
                f"{layer.out_features} x {layer.in_features}, may be {largest} at most; load the network that was "
                "compressed"
            )
        if rank is not None:
            left, right = (
                layer.weight.new_empty(layer.out_features, rank),
                layer.weight.new_empty(rank, layer.in_features),
            )
            replace_submodule(model, name, LowRankLinear(left, right, layer.bias))
    return model


def _header(path: Path) -> dict[str, SavedTensor]:
    """Raises `ValueError` where it is not whole."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: SavedTensor(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}); save or fetch it again") from error


def _misfits(model: nn.Module, found: dict[str, SavedTensor]) -> list[str]:
    """Where names, shapes or kinds of numbers in a file are others than the network's.

    Of tensors that are one and the same the file holds one, by any of their names.
    """
    expected = model.state_dict(keep_vars=True)
    held = {id(expected[name]) for name in found.keys() & expected.keys()}
    misfits = [f"{name} is unexpected" for name in found.keys() - expected.keys()]
    for name, tensor in expected.items():
        if name not in found:
            misfits += [f"{name} is missing"] if id(tensor) not in held else []
        elif found[name].shape != tuple(tensor.shape):
            misfits.append(f"{name}: {found[name].shape} instead of {tuple(tensor.shape)}")
        elif (found[name].dtype in FLOATS) != tensor.is_floating_point():
            misfits.append(f"{name}: {found[name].dtype} instead of {tensor.dtype}")
    return sorted(misfits)


def _recipe_of(result: CompressionResult) -> Recipe | None:
    """What builds the network again from JSON alone; None for one that nothing known does."""
    model = result.model
    recipe = getattr(model, "recipe", None) or (recipe_of(model) if is_transformers(model) else _timm_recipe(result))
    try:
        if recipe is None:
            raise ValueError(f"nothing known here builds this {type(model).__name__}")
        recipe = recipe.portable()
        recipe.refuse_foreign()
    except ValueError as error:
        log.warning("the saved network will have to be loaded onto a given one, as model=: %s", error)
        return None
    return recipe


def _timm_recipe(result: CompressionResult) -> TimmModel | None:
    """timm's name of the network and the options that it shows, if these make the same network."""
    model = result.model
    tag = getattr(model, "pretrained_cfg", {}).get("architecture")
    if tag is None:
        return None
    arguments: dict[str, Any] = {"num_classes": model.num_classes}
    try:
        with torch.device("meta"):
            arguments |= options_beside(model, _built(TimmModel(tag=tag, arguments=arguments)))
            recipe = TimmModel(tag=tag, arguments=arguments, weights="random")
            rebuilt = _planned(_built(recipe), result.plan)
    except ValueError:  # it has other layers, or takes other options
        return None
    return recipe if _structure(rebuilt) == _structure(model) else None


def _structure(model: nn.Module) -> tuple[str, dict[str, torch.Size], dict[tuple[str, str], Any]]:
    """What tells networks with the same names apart: what they print, their shapes, and their modules' settings."""
    shapes = {name: tensor.shape for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    settings = {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, bool | int | float | str | tuple | list) and attribute not in IRRELEVANT
    }
    return repr(model), shapes, settings


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those of floating-point numbers that are in no file: the network computes them where it is built."""
    saved = model.state_dict().keys()
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in saved and buffer.is_floating_point()}


def _types_of_buffers(model: nn.Module) -> dict[str, Any]:
    """Of those in no file, where they are not in float32, as most networks compute them."""
    names = {dtype: name for name, dtype in FLOATS.items()}
    types = {name: names[buffer.dtype] for name, buffer in _unsaved_buffers(model).items()}
    return {name: kind for name, kind in types.items() if kind != "F32"}


def _describe(recipe: Recipe | None) -> dict[str, Any] | None:
    return {"kind": recipe.kind, **asdict(recipe)} if recipe else None
