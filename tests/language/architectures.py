"""Tiny language models of several architectures, with random weights, and sequences to run them on."""

import torch

from facts.models import CausalLM
from facts.moments.losses import next_tokens

NUM_TOKENS = 64
DECODER = {"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER |= {"max_position_embeddings": 64}
# Queries share keys and values: grouped-query attention.
LLAMA_STYLE = {**DECODER, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 2048}
CONFIGURATIONS = {
    "qwen3": {**LLAMA_STYLE, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "llama": {**LLAMA_STYLE, "model_type": "llama"},
    "gemma2": {**LLAMA_STYLE, "model_type": "gemma2", "head_dim": 8},
    "phi3": {**LLAMA_STYLE, "model_type": "phi3", "pad_token_id": 0},
    "gpt2": {**DECODER, "model_type": "gpt2"},
    "opt": {**DECODER, "model_type": "opt", "word_embed_proj_dim": 32, "ffn_dim": 48},
    "biogpt": {**DECODER, "model_type": "biogpt", "intermediate_size": 48},  # its head is called `output_projection`
}
LAYERS = {"biogpt": 12, "qwen3": 14, "llama": 14, "gemma2": 14, "phi3": 8, "gpt2": 8, "opt": 12}


def build(kind: str, **fields):
    torch.manual_seed(0)
    recipe = CausalLM(configuration=CONFIGURATIONS[kind], weights="random", arguments={"bos_token_id": 1, **fields})
    model = recipe.build()
    with torch.no_grad():  # far from linear, so that attention and gates matter
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def sequences(sizes=(3, 3, 2), length=12, seed=1):
    """Batches of the given sizes, the same sequences whatever the sizes."""
    tokens = torch.randint(NUM_TOKENS, (sum(sizes), length), generator=torch.Generator().manual_seed(seed))
    return [(part, next_tokens(part)) for part in tokens.split(sizes)]
