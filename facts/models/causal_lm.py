"""Language models of transformers, with their tokenizers."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from facts.hub import hub
from facts.models.builders import Recipe
from facts.models.weights import read_checkpoint, refuse_misfits
from facts.networks import with_linear_layers
from facts.quiet import quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


END = "<|endoftext|>"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class CausalLM(Recipe):
    """Any `AutoModelForCausalLM`, by its `configuration` (with `model_type`) or by the one published under its `tag`.

    `arguments` change fields of the configuration. Weights are read as float32; the tokenizer is the one that lies
    beside them, and the network has it as `.tokenizer`. GPT-2's `Conv1D` becomes `nn.Linear`. No code is fetched.
    """

    kind: ClassVar[str] = "transformers"
    tag: str | None = None
    configuration: dict[str, Any] | None = None

    @property
    def repository(self) -> str:
        if self.tag is None:
            raise ValueError("without a tag no weights are published: set weights to a file, a folder or `random`")
        return self.tag

    def architecture(self) -> nn.Module:
        transformers = import_transformers()
        config = self.transformers_config()
        return with_linear_layers(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))

    def transformers_config(self) -> "PretrainedConfig":
        """Raises `ValueError` for an architecture that transformers does not know, `OSError` where none is found."""
        transformers = import_transformers()
        if self.configuration is None:
            try:
                with hub():
                    return transformers.AutoConfig.from_pretrained(self.repository, **self.arguments)
            except OSError as error:
                raise FileNotFoundError(
                    f"the configuration of {self.tag} is neither on this machine nor to be had ({error}); give it as "
                    "`configuration`"
                ) from error
        fields = {**self.configuration, **self.arguments}
        kind = fields.pop("model_type", None)
        if kind not in transformers.CONFIG_MAPPING:
            raise ValueError(f"transformers {transformers.__version__} knows no model_type {kind!r}")
        return transformers.AutoConfig.for_model(kind, **fields)

    def loaded(self, path: Path) -> nn.Module:
        """By transformers, which knows older names of tensors, and which of them are one and the same."""
        with torch.device("meta"):
            architecture = type(self.architecture())
        with quiet():
            model, found = architecture.from_pretrained(
                None,
                config=self.transformers_config(),
                state_dict=read_checkpoint(path),
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # they are an error below
                output_loading_info=True,
            )
        misfits = [f"{name}: {was} instead of {ours}" for name, was, ours in found["mismatched_keys"]]
        misfits += [f"{name} is {what}" for what in ("missing", "unexpected") for name in found[f"{what}_keys"]]
        refuse_misfits(misfits, model, path)
        model = with_linear_layers(model)
        read_beside(model, path.parent)
        if self.tag and not hasattr(model, "tokenizer"):
            with hub(), suppress(OSError):
                model.tokenizer = import_transformers().AutoTokenizer.from_pretrained(self.tag)
                model.generation_config = import_transformers().GenerationConfig.from_pretrained(self.tag)
        return model

    def build(self) -> nn.Module:
        model = super().build()
        model.recipe = replace(self, configuration=model.config.to_diff_dict(), arguments={})
        return model


def recipe_of(model: nn.Module) -> CausalLM | None:
    """What builds the architecture of a language model of transformers; None for its other networks."""
    if type(model) not in import_transformers().MODEL_FOR_CAUSAL_LM_MAPPING.values():
        return None
    return CausalLM(configuration=model.config.to_diff_dict(), weights="random")


def write_beside(model: nn.Module, folder: Path) -> None:
    """What generating text needs besides the weights: settings, and the tokenizer if the model has one; all JSON."""
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer := getattr(model, "tokenizer", None):
        tokenizer.save_pretrained(folder, save_jinja_files=False)


def read_beside(model: nn.Module, folder: Path) -> None:
    """Give a model what `write_beside` wrote."""
    if (folder / GENERATION).exists():
        model.generation_config = import_transformers().GenerationConfig.from_pretrained(folder, local_files_only=True)
    if (folder / TOKENIZER).exists():
        model.tokenizer = import_transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)


def new_tokenizer(text: str, num_tokens: int) -> "PreTrainedTokenizerBase":
    """A byte-level BPE tokenizer made for a text, whose token 0 begins and ends one."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], num_tokens, special_tokens=[END], show_progress=False)
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END
    )


def import_transformers() -> Any:
    """Raises `ImportError` that says how it is installed."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"language models need transformers ({error}): pip install 'facts[llm]'") from error
    return transformers
