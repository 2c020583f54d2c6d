"""Networks of transformers: for language, images, or both, with their tokenizers and processors."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from facts.models.builders import Recipe, nested, refuse_references
from facts.models.weights import read_checkpoint, refuse_misfits
from facts.modules.linear_calls import with_linear_layers
from facts.utils.hub import offline, refusal
from facts.utils.options import first_line, needing, options
from facts.utils.progress import silence

# Files that `save_pretrained` writes, by the attribute of a network and transformers' class that reads it.
PROCESSORS = {
    "tokenizer": ("tokenizer_config.json", "AutoTokenizer"),
    "image_processor": ("preprocessor_config.json", "AutoImageProcessor"),
}
CODE = ("auto_map", "attribute_map", "quantization_config")  # fields that make transformers fetch or run something else
IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")  # others may be hub kernels
LABELS = ("id2label", "label2id")  # names of classes, in any words
PAIRS = {"clip": "CLIPModel", "siglip": "SiglipModel"}  # an image and a text encoder
IN_PAIR = "vision_model."  # names of the image encoder's tensors
FOREIGN = "timm_wrapper"  # timm would build, and load, what its other settings say


@options
class TransformersModel(Recipe):
    """A transformers network, given by its `configuration` (with `model_type`) or by one published under a `tag`.

    `arguments` change fields of the configuration. Weights are read as float32. A tokenizer or image processor next
    to them, or under the tag, becomes the network's `.tokenizer` or `.image_processor`. No code is fetched.
    """

    auto_class: ClassVar[str]
    mapping: ClassVar[str]  # transformers' table of its possible classes, by type of configuration
    processor: ClassVar[str] = "image_processor"  # attribute of the network
    tag: str | None = None
    configuration: dict[str, Any] | None = None

    @classmethod
    def classes(cls) -> dict[str, tuple[str, ...]]:
        """Names of the transformers classes that this recipe can build, by type of configuration."""
        modeling_auto = import_transformers().models.auto.modeling_auto
        table: Mapping[str, str | Sequence[str]] = getattr(modeling_auto, cls.mapping)
        return {kind: (names,) if isinstance(names, str) else tuple(names) for kind, names in table.items()}

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Make a recipe for a network's architecture; None if this kind of recipe does not build its class."""
        name = type(model).__name__
        known = any(name in names for names in cls.classes().values())
        if not known or getattr(import_transformers(), name, None) is not type(model):
            return None
        return cls(configuration=configuration_of(model), weights="random")

    @property
    def name(self) -> str:
        return self.tag or str((self.configuration or {}).get("model_type"))

    @property
    def repository(self) -> str:
        if self.tag is None:
            raise ValueError("without a tag no weights are published: set weights to a file, a folder or `random`")
        return self.tag

    def architecture(self) -> nn.Module:
        config = self.transformers_config()
        auto_class = getattr(import_transformers(), self.auto_class)
        return with_linear_layers(auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False))

    def portable(self) -> Self:
        settings = {name: value for name, value in (self.configuration or {}).items() if name != "auto_map"}
        return replace(super().portable(), configuration=settings or None)

    def refuse_foreign(self) -> None:
        super().refuse_foreign()
        if self.configuration is None:
            raise ValueError("the recipe has no configuration, which a saved network must hold rather than fetch")
        if self.configuration.get("model_type") == FOREIGN:
            raise ValueError(f"a timm network within transformers ({FOREIGN}) cannot be saved: compress timm's own")
        for settings in (self.configuration, self.arguments):
            settings = {name: value for name, value in settings.items() if name not in LABELS}
            refuse_references(settings, "configuration")
            for path, value in nested(settings):  # however deep
                name = path.rpartition(".")[2]
                foreign = (name in CODE and value is not None) or name.startswith("__")
                if foreign or ("_implementation" in name and value not in IMPLEMENTATIONS):
                    raise ValueError(f"the recipe's configuration sets {name} to {value!r}, which is more than data")

    def transformers_config(self) -> Any:
        """Make transformers' configuration. Raises `ValueError` for unknown settings, `OSError` if it is missing."""
        transformers = import_transformers()
        configuration = published_configuration(self.repository) if self.configuration is None else self.configuration
        kind = configuration.get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            raise ValueError(f"transformers {transformers.__version__} does not support model_type {kind!r}")
        default = transformers.AutoConfig.for_model(kind)
        known = {*default.to_dict(), *default.attribute_map}
        if unknown := self.arguments.keys() - known:
            raise ValueError(f"{kind} has no field {', '.join(sorted(unknown))}, only {', '.join(sorted(known))}")
        return transformers.AutoConfig.for_model(**{**configuration, **self.arguments})

    def loaded(self, path: Path) -> nn.Module:
        """Load with transformers, which maps older tensor names and ties shared tensors."""
        with torch.device("meta"):
            architecture: Any = self.architecture()
        with silence():
            model, found = type(architecture).from_pretrained(
                None,
                config=self.transformers_config(),
                state_dict=self.renamed(read_checkpoint(path), architecture),
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # these raise an error below
                output_loading_info=True,
            )
        misfits = [f"{name}: {was} instead of {ours}" for name, was, ours in found["mismatched_keys"]]
        misfits += [f"{name} is {what}" for what in ("missing", "unexpected") for name in found[f"{what}_keys"]]
        refuse_misfits(misfits, model, path)
        model = with_linear_layers(model)
        read_processors(model, path.parent)
        return model

    def build(self) -> nn.Module:
        model = super().build()
        if self.tag and not hasattr(model, self.processor):
            generation, local = import_transformers().GenerationConfig, {"local_files_only": offline()}
            with suppress(OSError):
                setattr(model, self.processor, read_processor(self.processor, self.tag, **local))
                if model.can_generate():
                    model.generation_config = generation.from_pretrained(self.tag, **local)
        model.recipe = replace(self, configuration=configuration_of(model), arguments={})  # type: ignore[assignment]
        return model


@options
class CausalLM(TransformersModel):
    """Any `AutoModelForCausalLM`. GPT-2's `Conv1D` becomes `nn.Linear`."""

    kind: ClassVar[str] = "transformers"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    mapping: ClassVar[str] = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    processor: ClassVar[str] = "tokenizer"


@options
class ImageClassifier(TransformersModel):
    """Any `AutoModelForImageClassification`."""

    kind: ClassVar[str] = "transformers_images"
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    mapping: ClassVar[str] = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"


@options
class ImageEncoder(TransformersModel):
    """Any `AutoModel` without a classifier: ViT, DINOv2, the image encoders of CLIP and SigLIP."""

    kind: ClassVar[str] = "transformers_encoder"
    auto_class: ClassVar[str] = "AutoModel"
    mapping: ClassVar[str] = "MODEL_MAPPING_NAMES"

    @classmethod
    def in_pair(cls, configuration: dict[str, Any]) -> dict[str, Any] | None:
        """Return the configuration of the image encoder of a pair, CLIP or SigLIP; None for other networks."""
        pair = PAIRS.get(str(configuration.get("model_type")))
        if pair is None or configuration.get("architectures", [pair]) != [pair]:  # CLIPForImageClassification is none
            return None
        return import_transformers().AutoConfig.for_model(**configuration).vision_config.to_diff_dict()

    def renamed(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """For the image encoder of a pair, leave out the text encoder and projections."""
        if hasattr(model, "get_text_features"):  # the pair itself
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name.startswith(IN_PAIR)} or tensors


@options
class ImageTextModel(TransformersModel):
    """Any `AutoModelForImageTextToText`: language models with a vision tower.

    `.tokenizer` and `.image_processor` are saved, not the processor that combines them.
    """

    kind: ClassVar[str] = "transformers_image_text"
    auto_class: ClassVar[str] = "AutoModelForImageTextToText"
    mapping: ClassVar[str] = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"


def configuration_of(model: nn.Module) -> dict[str, Any]:
    """Settings of a network, with its class, since a type of configuration may have several."""
    return {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}


def published_configuration(tag: str) -> dict[str, Any]:
    """Read the configuration's JSON from the hub. Raises `FileNotFoundError` if it cannot be fetched."""
    try:
        return import_transformers().PretrainedConfig.get_config_dict(tag, local_files_only=offline())[0]
    except OSError as error:
        reason = refusal(error, tag) or f"{first_line(error)}; give it as `configuration`"
        message = f"the configuration of {tag} could not be fetched: {reason}"
        raise FileNotFoundError(message) from error


def write_processors(model: nn.Module, folder: Path) -> None:
    """Write a network's JSON files: generation settings, tokenizer, image processor."""
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer := getattr(model, "tokenizer", None):
        tokenizer.save_pretrained(folder, save_jinja_files=False)
    if processor := getattr(model, "image_processor", None):
        processor.save_pretrained(folder)


def read_processors(model: nn.Module, folder: Path) -> None:
    """Give a network what `write_processors` wrote to a folder."""
    if (folder / "generation_config.json").exists():
        model.generation_config = import_transformers().GenerationConfig.from_pretrained(folder, local_files_only=True)
    for attribute, (file, _) in PROCESSORS.items():
        if (folder / file).exists():
            setattr(model, attribute, read_processor(attribute, folder, local_files_only=True))


def read_processor(attribute: str, source: Path | str, **settings: Any) -> Any:
    """Load the tokenizer or image processor from a folder or tag. Raises `ValueError` if it would run foreign code."""
    reader = getattr(import_transformers(), PROCESSORS[attribute][1])
    return reader.from_pretrained(source, trust_remote_code=False, **settings)


def import_transformers() -> Any:
    """Import transformers. Raises a `ModuleNotFoundError` that says how to install it."""
    with needing("llm", "a network of transformers"):
        import transformers
    return transformers
