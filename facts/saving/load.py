"""Load a compressed network from a folder of JSON and safetensors, without running code from it."""

import pkgutil
from pathlib import Path

import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from facts.models.from_transformers import read_processors
from facts.models.weights import refuse_misfits, sha256
from facts.modules.linear_calls import skeleton
from facts.modules.networks import is_transformers
from facts.modules.pivoted import PivotedLinear
from facts.parts import emptied
from facts.result import CompressionResult
from facts.saving.elastic import cut
from facts.saving.hub import pull
from facts.saving.manifest import DECOMPOSITIONS, MANIFEST, WEIGHTS, Manifest
from facts.saving.recipes import build_recipe, read_recipe
from facts.saving.structure import convert, misfits, read_header
from facts.saving.validation import bounded_parameters, refuse_large_buffers, refuse_what_is_not_data
from facts.search.budget import Budget
from facts.utils.hub import REPOSITORY

DENSE_PER_SAVED = 16  # far more parameters than any network registers per tensor in its file


def load_compressed(
    source: Path | str,
    model: nn.Module | None = None,
    *,
    ratio: float | None = None,
    flops: float | None = None,
    params: float | None = None,
    latency_ms: float | None = None,
    architecture: str | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> CompressionResult:
    """Load a folder that `save_compressed` wrote, on the CPU and in evaluation mode.

    `source` is a folder, or a repository `OWNER/NAME` on Hugging Face, with `revision` (branch, tag or commit) and
    `token`. If it holds no recipe, give the dense network as `model`, whose tensors the result takes over, or as
    `architecture` the function that builds it, `package.module:function`. A folder that `save_elastic` wrote is cut to
    a budget: `ratio` of the compressed parts' FLOPs, or `flops`, `params` and `latency_ms` (of one sample, measured
    here) of the whole network. Only data are read. Raises `FileNotFoundError` or `ValueError`, before a recipe's
    weights are allocated, for missing files, misfits or code.
    """
    budget = Budget(flops=flops, params=params, latency_ms=latency_ms)
    if architecture and model is not None:
        raise ValueError("model and architecture both define the dense network: give one of them")
    folder = _folder(source, revision, token)
    refuse_what_is_not_data(folder)
    manifest, weights = Manifest.read(folder), folder / WEIGHTS
    tensors = read_header(weights)
    if architecture:
        model = built_by(architecture)
    if model is None:
        recipe = read_recipe(manifest.recipe, folder / MANIFEST)
        with torch.device("meta"), bounded_parameters(DENSE_PER_SAVED * len(tensors)):
            sketch = build_recipe(recipe)
    else:
        sketch = skeleton(model)
    planned = emptied(sketch, manifest.plan, manifest.layouts)
    refuse_misfits(misfits(planned, tensors), sketch, weights)
    refuse_large_buffers(sketch, weights.stat().st_size)
    if sha256(weights) != manifest.fingerprint:
        raise ValueError(
            f"{weights} is not the file that {MANIFEST} describes (different SHA-256): save or fetch both again"
        )
    model = build_recipe(recipe) if model is None else model
    model = emptied(model, manifest.plan, manifest.layouts)
    convert(model, tensors, manifest.buffers)
    for parameter in model.parameters():  # safetensors refuses parts of a larger tensor, as in PyTorch's attention
        if type(parameter.data) is Tensor and parameter.untyped_storage().nbytes() > parameter.nbytes:
            parameter.data = parameter.data.clone()
    load_model(model, weights)
    _refuse_wrong_values(model, weights)
    if is_transformers(model):
        read_processors(model, folder)
    model.provenance = manifest.base_model  # type: ignore[assignment]
    result = CompressionResult(model.eval(), manifest.plan, manifest.summary, manifest.skipped)
    if ratio is not None or budget.limits:
        result = cut(result, folder, budget.with_ratios(ratio))
        _refuse_wrong_values(result.model, folder / DECOMPOSITIONS)
    return result


def built_by(architecture: str) -> nn.Module:
    """Build the network with a function named as `package.module:function`. Raises `ValueError`."""
    try:
        build = pkgutil.resolve_name(architecture)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"there is no function {architecture!r} ({error}): give package.module:function") from error
    if not isinstance(model := build(), nn.Module):
        raise ValueError(f"{architecture} returns a {type(model).__name__} instead of the dense network")
    return model


def _refuse_wrong_values(model: nn.Module, path: Path) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{path}: {name} holds NaN or infinity; save or fetch the network again")
    for name, module in model.named_modules():
        order = module.order if isinstance(module, PivotedLinear) else None
        if order is not None and not order.sort().values.equal(torch.arange(len(order))):
            raise ValueError(f"{path}: {name}.order is not a permutation; save or fetch the network again")


def _folder(source: Path | str, revision: str | None, token: str | None) -> Path:
    if revision is None and Path(source).is_dir():
        return Path(source)
    if not REPOSITORY.fullmatch(str(source)):
        raise FileNotFoundError(f"{source} is not a folder: give one that save_compressed wrote, or OWNER/NAME")
    try:
        return pull(str(source), revision, token)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise FileNotFoundError(f"{source} is not a folder, and no repository could be read: {reason}") from error
