"""Networks named on the command line."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from facts.cli.options import TIMM, TORCHVISION, TRANSFORMERS
from facts.finetuning.recovery import HALVES
from facts.models import CausalLM, ImageClassifier, ImageEncoder, Recipe, TimmModel, TorchvisionModel
from facts.models.builders import classifiers
from facts.models.from_transformers import (
    TransformersModel,
    import_transformers,
    published_configuration,
    read_processors,
)
from facts.models.weights import PUBLISHED, fetch, read_checkpoint
from facts.modules.networks import is_encoder, reads_tokens
from facts.result import CompressionResult
from facts.saving.load import load_compressed
from facts.saving.manifest import MANIFEST
from facts.tasks.classification.base import data_config
from facts.tasks.language import Corpus

NAMED: dict[str, tuple[type[TimmModel | TorchvisionModel], Callable[[str], bool], Callable[[], list[str]]]] = {
    TIMM: (TimmModel, timm.models.is_model, timm.list_models),
    TORCHVISION: (TorchvisionModel, lambda tag: tag in classifiers(), classifiers),
}
CONFIGURATION = "config.json"
PROCESSORS = ("tokenizer", "image_processor")


def load(
    name: str, weights: str | None, num_classes: int | None, device: str | None, architecture: str | None
) -> nn.Module:
    """`build` a network, or load a folder that `facts compress` wrote, on a network that `architecture` makes."""
    if not (Path(name) / MANIFEST).is_file():
        if architecture:
            raise ValueError(f"--architecture is for a folder with a compressed network, and {name} is not one")
        return build(name, weights, num_classes, device)
    network = load_result(name, architecture)[0].model.to(_device(device))
    if num_classes is not None or (weights and not is_encoder(network)):
        raise ValueError(f"{name} has weights and classes of its own: leave out --weights and --num-classes")
    return network


def load_result(folder: Path | str, architecture: str | None = None) -> tuple[CompressionResult, torch.dtype]:
    """Load a folder that `facts compress` wrote, to compute in float32, and the type of its weights."""
    result = load_compressed(folder, architecture=architecture)
    dtype = next(each.dtype for each in result.model.parameters() if each.is_floating_point())
    result.model.float()
    return replace(result, summary=replace(result.summary, seconds={})), dtype  # those are another command's


def stored_type(network: nn.Module) -> torch.dtype:
    """The type of most values in the checkpoint that a network was built from; float32 if it is not on this machine."""
    path = network.recipe.checkpoint() if isinstance(network.recipe, Recipe) else None
    if path is None:
        return torch.float32
    types = Counter[torch.dtype]()
    for tensor in read_checkpoint(path).values():
        types[tensor.dtype] += tensor.numel()
    return max(HALVES.keys() & types.keys(), key=types.__getitem__, default=torch.float32)


def build(name: str, weights: str | None, num_classes: int | None, device: str | None) -> nn.Module:
    """Build the network of a name, in evaluation mode on its device (default: the GPU, if there is one)."""
    place = _device(device)  # before minutes of loading
    torch.manual_seed(0)  # random weights are the same in every run
    network = _recipe(name, weights, num_classes).build()
    if isinstance(network.recipe, TransformersModel) and vars(network).keys().isdisjoint(PROCESSORS):
        read_processors(network, Path(name).expanduser())  # its weights are random, or elsewhere
    return network.to(place)


def original_of(compressed: nn.Module, weights: str | None, device: str | None) -> nn.Module:
    """Rebuild the network that a loaded one was made from, and move both to a device.

    Raises `ValueError` if its weights are not published, and for weights other than the ones it was made from.
    """
    place, recipe = _device(device), vars(compressed).get("recipe")
    if recipe is None:
        raise ValueError("nothing in the folder says how to rebuild the original: compare the two networks in Python")
    known: dict[str, str] = vars(compressed)["provenance"] or {}
    if weights is None and "repository" in known:
        weights = str(fetch(known["repository"]))
    if weights is None and not isinstance(recipe, TorchvisionModel):
        source = known.get("source", "not known")
        raise ValueError(f"the original's weights ({source}) are not published: give them as --weights FILE")
    torch.manual_seed(0)  # as `build` does
    original = replace(recipe, weights=weights or "pretrained").build()
    if known.get("sha256") not in (None, original.recipe.provenance().get("sha256")):
        raise ValueError(f"the folder was made from other weights ({known['source']}): give those as --weights FILE")
    compressed.to(place)
    return original.to(place)


def input_shape(network: nn.Module, sequence_length: int | None = None) -> tuple[int, ...]:
    """Shape of one image `[C, H, W]`, or of a window of tokens `[1, T]`."""
    if reads_tokens(network):
        return 1, sequence_length or Corpus.sequence_length
    return data_config(network)["input_size"]


def _recipe(name: str, weights: str | None, num_classes: int | None) -> Recipe:
    if (Path(name) / MANIFEST).is_file():
        raise ValueError(f"{name} is compressed already: name the network it was made from, and a smaller budget")
    chosen = weights or "pretrained"
    arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    for prefix, (recipe, is_known, names) in NAMED.items():
        if name.startswith(prefix):
            tag = name.removeprefix(prefix)
            if not is_known(tag):
                raise ValueError(f"there is no network {name!r}: {_meant(tag.partition('.')[0], names())}")
            if num_classes == 0 and recipe is not TimmModel:
                raise ValueError(f"--num-classes 0, no classifier, is for networks of timm, not for {name}")
            return recipe(tag=tag, weights=chosen, arguments=arguments)
    if num_classes is not None:
        raise ValueError(f"--num-classes is for networks of timm and torchvision, not for {name}")
    if name.startswith(TRANSFORMERS):
        tag = name.removeprefix(TRANSFORMERS)
        return _of_transformers(published_configuration(tag), name, tag=tag, weights=chosen)
    folder = Path(name).expanduser()
    if (folder / CONFIGURATION).is_file():
        own = next((folder / file for file in PUBLISHED if (folder / file).is_file()), folder / PUBLISHED[0])
        try:
            configuration = json.loads((folder / CONFIGURATION).read_bytes())
        except ValueError as error:
            raise ValueError(f"{folder / CONFIGURATION} is damaged: {error}") from error
        return _of_transformers(configuration, name, configuration=configuration, weights=weights or str(own))
    raise ValueError(
        f"there is no network {name!r}: name one as {TIMM}NAME, {TORCHVISION}NAME or {TRANSFORMERS}OWNER/NAME, or "
        f"give a folder with the {CONFIGURATION} of transformers; `facts evaluate` also takes one of `facts compress`"
    )


def _of_transformers(settings: dict, name: str, **fields: Any) -> TransformersModel:
    """The recipe of a configuration's network; for a pair with a text encoder (CLIP, SigLIP), of its image encoder."""
    encoder = ImageEncoder.in_pair(settings)
    return ImageEncoder(**fields | {"configuration": encoder}) if encoder else _kind(settings, name)(**fields)


def _kind(configuration: dict, name: str) -> type[TransformersModel]:
    """The recipe of a configuration's class, or else of its type. Raises `ValueError` if it has none."""
    architectures, kind = configuration.get("architectures") or (), configuration.get("model_type")
    for recipe in (CausalLM, ImageClassifier):
        if any(architecture in names for names in recipe.classes().values() for architecture in architectures):
            return recipe
    known = {each for names in ImageEncoder.classes().values() for each in names}
    if any(getattr(import_transformers(), each).main_input_name == "pixel_values" for each in known & {*architectures}):
        return ImageEncoder
    for recipe in (CausalLM, ImageClassifier):
        if kind in recipe.classes():
            return recipe
    raise ValueError(
        f"{name} is a transformers {kind!r}, neither a language model (AutoModelForCausalLM) nor an image "
        "classifier (AutoModelForImageClassification) or encoder (AutoModel of images alone)"
    )


def _meant(tag: str, names: list[str]) -> str:
    """Suggest names that begin with the given one, or are close to it."""
    near = [name for name in names if name.startswith(tag)][:3] or get_close_matches(tag, names)
    return f"is it {' or '.join(near)}?" if near else "`facts list models` lists them"


def _device(name: str | None) -> torch.device:
    """Device of a name. Raises `ValueError` if it is not on this machine."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:  # depending on the name and on how PyTorch was built
        reason = str(error).partition("\n")[0]
        raise ValueError(f"there is no device {name!r} here ({reason})") from error
