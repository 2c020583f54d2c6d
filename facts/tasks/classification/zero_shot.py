"""Zero-shot classification: the text nearest to an image, by a pair of encoders, CLIP or SigLIP."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from facts.models.from_transformers import import_transformers, read_processor
from facts.utils.hub import offline
from facts.utils.silence import silence


@torch.inference_mode()
def text_directions(pair: Path | str, texts: Sequence[str]) -> Tensor:
    """Directions `[D, C]` in float64; the text nearest to an image has the largest product with its features `[D]`.

    `pair` is a folder or repository of transformers with both encoders and the tokenizer. Raises `ValueError` if one is
    missing, or if texts become the same tokens.
    """
    settings = {"trust_remote_code": False, "local_files_only": offline()}
    try:
        tokenizer = read_processor("tokenizer", pair, local_files_only=offline())
        with silence():
            model = import_transformers().AutoModel.from_pretrained(pair, dtype=torch.float32, **settings).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"{pair} needs a configuration, the weights of both encoders and a tokenizer") from error
    length = model.config.text_config.max_position_embeddings
    options = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
    tokens = tokenizer(list(texts), **options)["input_ids"]
    if len(tokens.unique(dim=0)) < len(set(texts)):  # transformers makes an empty tokenizer where there is none
        raise ValueError(f"the tokenizer of {pair} does not tell all texts apart: shorten them, or complete it")
    # Without a mask: CLIP's attention is causal, and SigLIP learned to attend to the padding.
    found = normalize(model.get_text_features(input_ids=tokens).pooler_output.double()).T
    # The cosine of projected features is their product, but for a factor of the image.
    return model.visual_projection.weight.double().T @ found if hasattr(model, "visual_projection") else found
