"""Language models of transformers, with their tokenizers."""

from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from facts.models.from_transformers import TransformersModel, import_transformers, read_tokenizer
from facts.utils.hub import offline
from facts.utils.options import options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END = "<|endoftext|>"


@options
class CausalLM(TransformersModel):
    """Any `AutoModelForCausalLM`, by its `configuration` (with `model_type`) or by the one published under a `tag`.

    `arguments` change fields of the configuration. Weights are read as float32; the tokenizer beside them becomes the
    network's `.tokenizer`. GPT-2's `Conv1D` becomes `nn.Linear`. No code is fetched.
    """

    kind: ClassVar[str] = "transformers"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    mapping: ClassVar[str] = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"

    def fetch_beside(self, model: nn.Module) -> None:
        if self.tag and not hasattr(model, "tokenizer"):
            generation, local = import_transformers().GenerationConfig, {"local_files_only": offline()}
            with suppress(OSError):
                model.tokenizer = read_tokenizer(self.tag, **local)  # type: ignore[assignment]
                model.generation_config = generation.from_pretrained(self.tag, **local)


def new_tokenizer(text: str, num_tokens: int) -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE tokenizer on a text; its token 0 marks the beginning and the end of a text."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], num_tokens, special_tokens=[END], show_progress=False)
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END
    )
