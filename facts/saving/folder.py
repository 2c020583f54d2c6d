"""A compressed network as a folder of JSON and safetensors: nothing in it is code."""

import pkgutil
from itertools import chain
from operator import attrgetter
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from facts.models.from_transformers import read_processors, write_processors
from facts.models.weights import refuse_misfits, sha256
from facts.modules.linear_calls import skeleton
from facts.modules.networks import is_transformers
from facts.modules.quantized import Quantization, quantization_of
from facts.result import CompressionResult
from facts.saving.hub_methods import with_hub_methods
from facts.saving.manifest import MANIFEST, WEIGHTS, Manifest, Metrics, checked_metrics, versions
from facts.saving.model_card import write_card
from facts.saving.plans import layouts_of, refuse_non_permutations, with_plan
from facts.saving.provenance import provenance_of
from facts.saving.recipes import build_recipe, describe_recipe, read_recipe, recipe_of_result
from facts.saving.tensors import FLOATS, misfits, read_header, types_of_buffers, unsaved_buffers
from facts.saving.validation import bounded_parameters, refuse_large_buffers, refuse_what_is_not_data
from facts.utils.files import replacing, writable_folder
from facts.utils.hub import REPOSITORY, pulled

HASHED_AT_ONCE = 2**28  # bytes, a fraction of a second; a larger file is hashed once its header fits the network
DENSE_PER_SAVED = 16  # far more parameters than any network registers for each tensor of its file


def save_compressed(result: CompressionResult, folder: Path | str, metrics: Metrics | None = None) -> None:
    """Write `model.safetensors`, `compression.json` (recipe, plan, summary, provenance) and `README.md` into `folder`.

    For a language model, its generation settings and its `.tokenizer`, if any, are written too. The recipe is the one
    that built the model, or timm's name and the options that the model shows, if these rebuild the same network.
    Without a recipe, a warning is logged, and the folder can be loaded only with the dense network. `metrics` are
    measured values, `{"top1": {"original": 72.1, "compressed": 70.3}}`, for the model card, `README.md`. A card that
    was edited stays as it is. If the process is killed halfway, the folder is refused on loading, never mistaken for
    another network.
    """
    metrics = checked_metrics(metrics)
    folder = writable_folder(Path(folder))
    model = result.model
    with replacing(folder / WEIGHTS) as path:
        save_model(model, str(path))
    if is_transformers(model):
        write_processors(model, folder)
    manifest = Manifest(
        recipe=describe_recipe(recipe_of_result(result)),
        plan=result.plan,
        fingerprint=sha256(folder / WEIGHTS),
        versions=versions(model),
        summary=result.summary,
        skipped=result.skipped,
        base_model=provenance_of(model),
        metrics=metrics,
        buffers=types_of_buffers(model),
        layouts=layouts_of(model),
        quantization=quantization_of(model),
    )
    with replacing(folder / MANIFEST) as path:
        path.write_text(manifest.text())
    write_card(folder, folder.resolve().name)


def load_compressed(
    source: Path | str,
    model: nn.Module | None = None,
    *,
    architecture: str | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> CompressionResult:
    """Load a folder that `save_compressed` wrote, on the CPU and in evaluation mode.

    `source` is a folder, or a repository `OWNER/NAME` at Hugging Face; `revision` is its branch, tag or commit, and
    `token` gives access to a private one. `model` is the dense network, for a source without a recipe; the result takes
    over its tensors. In its place, `architecture` may name the function that builds it, as `package.module:function`:
    it is yours, never the folder's. Only data are read: raises `FileNotFoundError` or `ValueError`, before anything is
    built, if the folder is incomplete, holds a pickle or other code, links outside of itself, or does not fit.
    """
    if architecture and model is not None:
        raise ValueError("model and architecture both say what the dense network is: give one of them")
    folder = _folder(source, revision, token)
    refuse_what_is_not_data(folder)
    manifest = Manifest.read(folder)
    size = _size(folder / WEIGHTS)
    if size <= HASHED_AT_ONCE:
        _refuse_other_weights(folder / WEIGHTS, manifest.fingerprint)
    tensors = read_header(folder / WEIGHTS)
    if architecture:
        model = built_by(architecture)
    if model is None:
        recipe = read_recipe(manifest.recipe, folder / MANIFEST)
        with torch.device("meta"), bounded_parameters(DENSE_PER_SAVED * len(tensors)):
            sketch = build_recipe(recipe)
    else:
        sketch = skeleton(model)
    refuse_misfits(
        misfits(with_plan(sketch, manifest.plan, manifest.layouts, manifest.quantization), tensors),
        sketch,
        folder / WEIGHTS,
    )
    refuse_large_buffers(sketch, size)
    if size > HASHED_AT_ONCE:
        _refuse_other_weights(folder / WEIGHTS, manifest.fingerprint)
    if model is None:
        model = build_recipe(recipe)
    model = with_plan(model, manifest.plan, manifest.layouts, manifest.quantization)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tensors and tensors[name].dtype in FLOATS:
            tensor.data = tensor.data.to(FLOATS[tensors[name].dtype])
    for name, buffer in unsaved_buffers(model).items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(FLOATS[manifest.buffers.get(name, "F32")]))
    load_model(model, folder / WEIGHTS)
    refuse_non_permutations(model, folder / WEIGHTS)
    _refuse_no_numbers(model, manifest.quantization, folder / WEIGHTS)
    if is_transformers(model):
        read_processors(model, folder)
    model.provenance = manifest.base_model  # type: ignore[assignment]
    return with_hub_methods(CompressionResult(model.eval(), manifest.plan, manifest.summary, manifest.skipped))


def built_by(architecture: str) -> nn.Module:
    """The network that a function returns, named as `package.module:function`. Raises `ValueError`."""
    try:
        build = pkgutil.resolve_name(architecture)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(
            f"there is no function {architecture!r} ({error}): name one as package.module:function"
        ) from error
    if not isinstance(model := build(), nn.Module):
        raise ValueError(f"{architecture} returns a {type(model).__name__}, and is to return the dense network")
    return model


def _folder(source: Path | str, revision: str | None, token: str | None) -> Path:
    if revision is None and Path(source).is_dir():
        return Path(source)
    if REPOSITORY.fullmatch(str(source)):
        try:
            return pulled(str(source), revision, token)
        except (ConnectionError, FileNotFoundError, PermissionError) as error:
            raise type(error)(f"no folder {source} is here, and {error}") from error
    raise FileNotFoundError(f"{source} is no folder: give one that save_compressed wrote, or a repository OWNER/NAME")


def _size(path: Path) -> int:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: save or fetch the network again")
    return path.stat().st_size


def _refuse_no_numbers(model: nn.Module, quantization: Quantization | None, path: Path) -> None:
    quantized = ((name, attrgetter(name)(model)) for name in (quantization.tensors if quantization else ()))
    for name, weight in chain(model.named_parameters(), quantized):
        if weight.is_floating_point() and not weight.isfinite().all():
            raise ValueError(f"{path}: {name} holds NaN or infinity; save or fetch the network again")


def _refuse_other_weights(path: Path, fingerprint: str) -> None:
    if sha256(path) != fingerprint:
        raise ValueError(
            f"{path} is not the file that {MANIFEST} describes (other SHA-256): it was cut short, or only one of "
            "the two was replaced; save or fetch both again"
        )
