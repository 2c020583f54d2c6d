"""Recipes: a few plain values from which a network is built, so that a saved folder can hold them as JSON.

Those of timm, torchvision and MambaVision are here.
"""

import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import timm
import torch
from pydantic import Field, field_validator
from timm.layers import to_2tuple
from torch import Tensor, nn
from torchvision import models

from facts.models.mambavision import VARIANTS, MambaVision
from facts.models.weights import fetch, fetched, find_checkpoint, find_published, load_strictly, read_checkpoint, sha256
from facts.utils.files import at_home
from facts.utils.options import first_line, options

NUM_CLASSES = 1000  # of all published weights of torchvision
OTHERS = ("googlenet", "inception_v3", "mnasnet*", "regnet*", "vit_h_14")  # a name and tensors cannot rebuild these
PRESCRIBED = {"input_size", "num_classes"}  # settings that may differ from timm's table of published weights


@options
class Recipe(ABC):
    """Architecture of one network and the source of its weights.

    `weights` is `pretrained` (at Hugging Face), `random`, a checkpoint file, or a folder with published weights of many
    networks; a relative path may also be one within this installation. The architecture takes the `arguments`.
    """

    kind: ClassVar[str]
    weights: str = "pretrained"
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the network in its library or at its publisher."""

    @property
    def repository(self) -> str:
        """Repository at Hugging Face with the published weights; empty if they are elsewhere."""
        return ""

    @abstractmethod
    def architecture(self) -> nn.Module:
        """Build the network with random weights."""

    def renamed(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Rename a published checkpoint's tensors to the names of `model`."""
        return tensors

    def checkpoint(self) -> Path | None:
        """Find the weights' file on this machine; None for random weights and for weights that are not fetched yet."""
        if self.weights == "random":
            return None
        if self.weights == "pretrained":
            return fetched(self.repository)
        folder = at_home(self.weights)
        return find_published(folder, self.repository) if folder.is_dir() else find_checkpoint(self.weights)

    def provenance(self) -> dict[str, str]:
        """File name and SHA-256 of a built network's weights, to compare with those published."""
        if (path := self.checkpoint()) is None:
            return {"source": "random"}
        name = os.fsencode(path.name).decode(errors="replace")  # which JSON can hold, whatever the locale
        return {"source": name, "sha256": sha256(path)}

    def loaded(self, path: Path) -> nn.Module:
        """Build the network with the weights in a file. Raises `ValueError` if they do not fit."""
        model = self.architecture()
        load_strictly(model, self.renamed(read_checkpoint(path), model), path)
        return model

    def build(self) -> nn.Module:
        """Build the network in evaluation mode. Raises `FileNotFoundError`, or `ValueError` if weights do not fit."""
        path = self.checkpoint()
        if path is None and self.weights == "pretrained":
            path = fetch(self.repository)
        model = self.loaded(path) if path else self.architecture()
        model.recipe = self  # type: ignore[assignment]
        return model.eval()

    def portable(self) -> Self:
        """Recipe of only the architecture, without references to this machine."""
        return replace(self, weights="random")

    def refuse_foreign(self) -> None:
        """Raises `ValueError` if a recipe from somebody else would read, fetch or run anything."""
        if self.weights != "random":
            raise ValueError(f"the recipe's weights are {self.weights!r}, but a saved network allows only 'random'")
        refuse_references(self.arguments, "arguments")


@options
class TimmModel(Recipe):
    """A timm model, given by its tag, such as `swin_base_patch4_window7_224.ms_in22k_ft_in1k`."""

    kind: ClassVar[str] = "timm"
    tag: str

    @field_validator("tag")
    @classmethod
    def _of_its_own(cls, tag: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*", tag):
            raise ValueError(f"{tag!r} is not one of timm's tags, but a repository or a folder: see timm.list_models()")
        return tag

    @property
    def name(self) -> str:
        return self.tag

    @property
    def repository(self) -> str:
        published = timm.get_pretrained_cfg(self.tag) if timm.models.is_model_pretrained(self.tag) else None
        if published is None or published.hf_hub_id is None:
            raise ValueError(f"timm has no weights for {self.tag!r}: set weights to a file or `random`")
        return published.hf_hub_id

    def architecture(self) -> nn.Module:
        try:
            model: Any = timm.create_model(self.tag, **self.arguments)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise ValueError(f"timm cannot build {self.tag}: {first_line(error)}") from error
        if "pretrained_cfg_overlay" not in self.arguments:  # timm's own table describes the published network
            channels, *size = model.pretrained_cfg["input_size"]
            size = to_2tuple(self.arguments.get("img_size") or size)
            own = (self.arguments.get("in_chans", channels), *size)
            model.pretrained_cfg = {**model.pretrained_cfg, "input_size": own}
        return model

    def refuse_foreign(self) -> None:
        super().refuse_foreign()
        overlay = self.arguments.get("pretrained_cfg_overlay", {})
        loading = {name for name in self.arguments if name.startswith(("pretrained", "checkpoint", "cache"))}
        loading -= {"pretrained_cfg_overlay"} if isinstance(overlay, dict) and overlay.keys() <= PRESCRIBED else set()
        if loading:
            raise ValueError(f"the recipe's arguments {', '.join(sorted(loading))} would have timm load something")

    def renamed(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Rename tensors as timm does; drop obsolete buffers, and the classifier of a network without classes."""
        if getattr(model, "num_classes", None) == 0:
            classifier = model.pretrained_cfg["classifier"]  # a distilled network has two
            heads = tuple(f"{name}." for name in ([classifier] if isinstance(classifier, str) else classifier))
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(heads)}
        translate = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if translate is None:
            return tensors
        try:
            translated = translate(tensors, model)
        except Exception:  # files of other networks can fail in any way; `load_strictly` reports the misfits
            return tensors
        held = {tensor.data_ptr() for tensor in tensors.values()}  # timm may resample tensors for another image size
        return translated if all(tensor.data_ptr() in held for tensor in translated.values()) else tensors


@options
class TorchvisionModel(Recipe):
    """A torchvision image classifier, given by its name, such as `resnet50`; `pretrained` loads its default weights.

    Images are prepared as for the default weights, through a `pretrained_cfg` like timm's.
    """

    kind: ClassVar[str] = "torchvision"
    tag: str

    @property
    def name(self) -> str:
        return self.tag

    @property
    def published(self) -> Any:
        return models.get_model_weights(self.tag).DEFAULT

    def checkpoint(self) -> Path | None:
        if self.weights != "pretrained":
            return super().checkpoint()
        path = Path(torch.hub.get_dir(), "checkpoints", Path(self.published.url).name)
        return path if path.is_file() else None

    def architecture(self) -> nn.Module:
        return self._described(models.get_model(self.tag, weights=None, **self.arguments))

    def build(self) -> nn.Module:
        """Build the network; torchvision loads its own weights, since older files name tensors differently."""
        if self.weights != "pretrained":
            return super().build()
        if self.arguments.get("num_classes", NUM_CLASSES) != NUM_CLASSES:
            raise ValueError(f"the published weights of {self.tag} are for 1,000 classes: set weights to your own file")
        try:
            model = self._described(models.get_model(self.tag, weights=self.published, **self.arguments))
        except (OSError, RuntimeError) as error:  # the latter if the file is damaged
            message = f"the weights of {self.tag} could not be fetched from {self.published.url} ({error})"
            raise FileNotFoundError(f"{message}: connect once, or set weights to a checkpoint file") from error
        model.recipe = self  # type: ignore[assignment]
        return model.eval()

    def _described(self, model: nn.Module) -> nn.Module:
        """Add the attributes by which timm's networks describe their images and classes."""
        images = self.published.transforms()
        (size,), (resized,) = images.crop_size, images.resize_size
        how = {"crop_pct": size / resized, "interpolation": images.interpolation.value}
        size = getattr(model, "image_size", size)  # its networks for images of one size record it
        cfg = {"input_size": (3, size, size), **how, "mean": tuple(images.mean), "std": tuple(images.std)}
        vars(model).update(pretrained_cfg=cfg, num_classes=self.arguments.get("num_classes", NUM_CLASSES))
        return model

    def refuse_foreign(self) -> None:
        super().refuse_foreign()
        loading = any(name.startswith(("weights", "pretrained")) for name in self.arguments)
        if loading or self.tag not in classifiers():
            raise ValueError(f"torchvision's {self.tag} is not a known classifier, or would load something")


@options
class MambaVisionModel(Recipe):
    """This package's MambaVision, given by the name of its size."""

    kind: ClassVar[str] = "mambavision"
    variant: Literal[*VARIANTS]  # type: ignore[valid-type]

    @property
    def name(self) -> str:
        return f"MambaVision-{self.variant}"

    @property
    def repository(self) -> str:
        return f"nvidia/MambaVision-{self.variant}-1K"

    def architecture(self) -> nn.Module:
        return MambaVision(**{**VARIANTS[self.variant], **self.arguments})

    def renamed(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Remove the prefix of names in the repository's file, and spell out its short form of `gamma`."""
        if not all(name.startswith("model.") for name in tensors):
            return tensors
        return {name.removeprefix("model.").replace(".g_", ".gamma_"): tensor for name, tensor in tensors.items()}


def differing_options(model: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """Find the options of `timm.create_model` in which a network differs from the plain one of the same name."""
    usual = _options_of(plain)
    return {name: value for name, value in _options_of(model).items() if value not in (None, usual[name])}


def _options_of(model: nn.Module) -> dict[str, Any]:
    """Common options as timm's networks record them; None for an option that a network does not record."""
    parameters, name = dict(model.named_parameters()), str(model.pretrained_cfg.get("first_conv"))
    model = getattr(model, "model", model)  # of features only; others of that kind have flat names
    names = name, f"model.{name}", name.replace(".", "_")
    first = next((parameters[f"{each}.weight"] for each in names if f"{each}.weight" in parameters), None)
    embedding = getattr(model, "patch_embed", getattr(model, "stem", None))
    image = getattr(embedding, "img_size", None)
    pool = getattr(model, "global_pool", None)
    return {
        "in_chans": None if first is None else first.shape[1],
        "img_size": list(image) if isinstance(image, tuple) else None,
        "global_pool": pool if isinstance(pool, str) else getattr(pool, "pool_type", None),
    }


def classifiers() -> list[str]:
    return models.list_models(module=models, exclude=OTHERS)


def refuse_references(values: Any, where: str) -> None:
    """Raises `ValueError` if nested plain values contain the name of a file, an address or a repository."""
    for name, value in nested(values, where):
        if isinstance(value, str) and not {"/", "\\", ":"}.isdisjoint(value):
            raise ValueError(f"the recipe's {name} is {value!r}, but it may not name a file or an address")


def nested(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested plain values under their dotted names, the outermost first."""
    yield name, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from nested(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from nested(inner, name)
