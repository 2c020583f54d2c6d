"""Zero-shot classification: the text nearest to an image, by a pair of encoders such as CLIP or SigLIP."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from facts.models.from_transformers import import_transformers, read_processor
from facts.utils.hub import offline


@torch.inference_mode()
def text_directions(pair: Path | str, texts: Sequence[str]) -> Tensor:
    """Directions `[D, C]` in float64; the text nearest to an image has the largest product with its features `[D]`.

    `pair` is a folder or repository of transformers with both encoders and the tokenizer. Raises `ValueError` for one
    without a text encoder, or fewer than two texts.
    """
    if len(texts) < 2:
        raise ValueError(f"zero-shot classification chooses between texts: give at least two, got {len(texts)}")
    settings = {"trust_remote_code": False, "local_files_only": offline()}
    model = import_transformers().AutoModel.from_pretrained(pair, dtype=torch.float32, **settings).eval()
    if not hasattr(model, "get_text_features"):
        raise ValueError(f"{pair} is a {type(model).__name__}, without a text encoder as in CLIP or SigLIP")
    tokenizer = read_processor("tokenizer", pair, local_files_only=offline())
    length = model.config.text_config.max_position_embeddings
    tokens = tokenizer(list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    found = normalize(model.get_text_features(**tokens).pooler_output.double()).T
    # The cosine of projected features is their product, but for a factor of the image.
    return model.visual_projection.weight.double().T @ found if hasattr(model, "visual_projection") else found
