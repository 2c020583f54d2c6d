"""Load a compressed network from a folder of JSON and safetensors, without running code from it."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from facts.models.from_transformers import read_processors
from facts.models.weights import refuse_misfits, sha256
from facts.modules.linear_calls import skeleton, unwrapped
from facts.modules.networks import is_transformers, tensors_of
from facts.parts import emptied
from facts.result import CompressionResult
from facts.saving.elastic import cut
from facts.saving.manifest import DECOMPOSITIONS, MANIFEST, WEIGHTS, Manifest
from facts.saving.recipes import build_recipe, published_settings, read_recipe
from facts.saving.structure import apart, convert, misfits, read_header, refuse_wrong_values
from facts.search.budget import Budget
from facts.utils.files import at_home
from facts.utils.hub import REPOSITORY, offline, refusal

DATA = ["model.safetensors", "elastic.safetensors", "*.json", "*.jinja", "*.md", "*.txt"]  # fetched from the Hub
DENSE_PER_SAVED = 16  # far more parameters than any network registers per tensor in its file
UNREAD = (".git", ".cache")  # folders of git and of Hugging Face's hub, which are never read
SETTINGS = ("config.json", "map.json")  # name endings of the files that transformers reads
REFERENCES = re.compile("auto_map|custom_generate|init_inputs|fast_tokenizer_files|.*_(file|path|dir)")  # their keys
MOST_PARSED = 2**22  # bytes of a JSON file that is parsed here, which takes thirteen times as much memory
MOST_JSON = 2**27  # bytes of any other; the largest tokenizers have a quarter of that
MOST_BUFFERS = 2**26  # bytes of tensors that no file holds, beyond the size of the file


@torch.inference_mode(False)  # whose tensors could never be trained
def load_compressed(
    source: Path | str,
    model: nn.Module | None = None,
    *,
    ratio: float | None = None,
    flops: float | None = None,
    params: float | None = None,
    latency_ms: float | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> CompressionResult:
    """Load a folder that `save_compressed` wrote, on the CPU and in evaluation mode.

    `source` is a folder, or a repository `OWNER/NAME` on Hugging Face, with `revision` (branch, tag or commit) and
    `token`. If it holds no recipe, give the dense network as `model`, whose tensors the result takes over. A folder
    that `save_elastic` wrote is cut to a budget: `ratio` of the compressed parts' FLOPs, or `flops`, `params` and
    `latency_ms` (of one sample, measured here) of the whole network. Only data are read. Raises `FileNotFoundError` or
    `ValueError`, before a recipe's weights are allocated, for missing files, misfits or code.
    """
    budget = Budget(flops=flops, params=params, latency_ms=latency_ms)
    folder = _folder(source, revision, token)
    refuse_harmful_files(folder)
    manifest, weights = Manifest.read(folder), folder / WEIGHTS
    header = read_header(weights)
    if model is None:
        recipe = read_recipe(manifest.recipe, folder / MANIFEST)
        with torch.device("meta"), BoundedTensors(DENSE_PER_SAVED * len(header)):
            sketch = build_recipe(recipe)
    else:
        model = _given(model)
        sketch = skeleton(model)
    planned = manifest.summary.parts, manifest.plan, manifest.layouts, manifest.described
    sketch = emptied(sketch, *planned)
    refuse_misfits(misfits(sketch, header), sketch, weights)
    refuse_large_buffers(sketch, weights.stat().st_size)
    tensors = load_file(weights)  # which are kept by the system if another save replaces the file from here on
    if sha256(weights) != manifest.fingerprint:
        raise ValueError(f"{weights} is not the file that {MANIFEST} describes (different SHA-256): fetch both again")
    refuse_wrong_values(sketch, tensors, weights)
    with torch.device("cpu"):  # not the default device
        model = emptied(build_recipe(recipe) if model is None else model, *planned)
    convert(model, tensors, manifest.buffers)
    _fill(model, tensors)
    shape = manifest.summary.input_shape
    if is_transformers(model):
        read_processors(model, folder)
    elif shape and len(shape) == 4:  # of images that it was compressed for, perhaps not the published size
        with suppress(AttributeError):  # if a class has it as a property
            model.pretrained_cfg = {**published_settings(model), "input_size": shape[1:]}  # type: ignore[assignment]
    model.provenance = manifest.base_model  # type: ignore[assignment]
    result = CompressionResult(model.eval(), manifest.plan, manifest.summary, manifest.skipped)
    if ratio is not None or budget.limits:
        result = cut(result, manifest.fingerprint, folder, budget.with_ratios(ratio))
        refuse_wrong_values(result.model, result.model.state_dict(), folder / DECOMPOSITIONS)
    return result


def _given(model: Any) -> nn.Module:
    """The dense network that a user gives. Raises `ValueError` for anything else."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be the dense network, got a {type(model).__name__}")
    model = unwrapped(model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("model has tensors on the meta device, which hold no values: build it on the CPU")
    return model


def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a file into a network; states that no file holds stay as they are."""
    # Parts of a larger tensor, as in PyTorch's attention, and expanded ones cannot be written one by one.
    own = {id(each): each for each in tensors_of(model).values() if type(each.data) is Tensor}.values()
    for tensor, data in zip(own, apart(each.data for each in own), strict=True):
        tensor.data = data
    states = model.state_dict()  # also with all names of shared tensors, which the file holds once
    states.update(tensors)
    model.load_state_dict(states)


def _folder(source: Path | str, revision: str | None, token: str | None) -> Path:
    if revision is None and (folder := at_home(source)).is_dir():
        return folder
    if not REPOSITORY.fullmatch(str(source)):
        kind = "a folder" if revision is None else "a repository, as a revision needs"
        raise FileNotFoundError(f"{source} is not {kind}: give one that save_compressed wrote, or OWNER/NAME")
    try:
        path = snapshot_download(
            str(source), revision=revision, token=token, allow_patterns=DATA, local_files_only=offline()
        )
        return Path(path)
    except OSError as error:
        reason = refusal(error, str(source)) or " ".join(str(error).split())
        raise FileNotFoundError(f"{source} is not a folder, and no repository could be read: {reason}") from error


def refuse_harmful_files(folder: Path) -> None:
    """Raises `ValueError` for the first file that leads out of `folder`, is too large, or refers to others or to code.

    Other files do no harm: nothing opens them, and nothing is unpickled.
    """
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in sorted(folders + files)):
            if fault := _link(path, folder) or _unfit(path) or _reference(path):
                raise ValueError(f"{path} {fault}")
        folders[:] = sorted(name for name in folders if name not in UNREAD)


def _link(path: Path, folder: Path) -> str | None:
    """Say where a link leads out of the folder; links in Hugging Face's cache to the repository's blobs are fine."""
    home, target = folder.resolve(), Path(os.path.realpath(path))  # which leaves circular links unresolved
    cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if not path.is_symlink() or target.is_relative_to(home) or cached:
        return None
    return f"is a link to {target}, outside of the folder: put the file itself there"


def _unfit(path: Path) -> str | None:
    if path.is_dir():
        return None
    if not path.is_file():
        return "is not a regular file: remove it"
    most = MOST_PARSED if path.name.endswith((MANIFEST, *SETTINGS)) else MOST_JSON
    if path.suffix.lower() == ".json" and path.stat().st_size > most:
        return f"has {path.stat().st_size:,} bytes, but only {most:,} are allowed: fetch it again"
    return None


def _reference(path: Path) -> str | None:
    """Say which setting would make transformers read other files or run code."""
    if not path.name.endswith(SETTINGS):
        return None
    try:
        settings = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error}): save or fetch it again"
    if not isinstance(settings, dict):
        return "is not a JSON object: save or fetch it again"
    named = [name for name, value in settings.items() if value is not None and REFERENCES.fullmatch(name)]
    return f"sets {named[0]}, which would read other files or run code: remove it" if named else None


class BoundedTensors(TorchFunctionMode):
    """Raises `ValueError` within the block once this thread has made more than `most` tensors, as layers make theirs.

    Otherwise it would take minutes to build 100,000 layers, which take no memory on the meta device, before a refusal.
    """

    def __init__(self, most: int):
        super().__init__()
        self.most, self.number = most, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += function is torch.empty
        if self.number > self.most:
            raise ValueError(f"it has more than {self.most} parameters, many more than the saved weights have")
        return function(*args, **(kwargs or {}))


def refuse_large_buffers(sketch: nn.Module, size_of_file: int) -> None:
    """Raises `ValueError` for a network on the meta device whose buffers would take far more than its weights."""
    size = sum(buffer.nbytes for buffer in sketch.buffers())
    if size > MOST_BUFFERS + size_of_file:
        raise ValueError(f"{type(sketch).__name__} would need {size / 2**30:.1f} GiB for tensors that no file holds")
