"""A published language model of children's stories with 260 thousand parameters, from llama2.c's files."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from facts.models import CausalLM

DATA = Path(__file__).parents[3] / "shared" / "data"
WEIGHTS = DATA / "lm_stories" / "stories260K.bin"
PIECES = DATA / "lm_stories" / "tok512.bin"
needs_files = pytest.mark.skipif(not (WEIGHTS.exists() and PIECES.exists()), reason=f"no language model in {DATA}")
HEADER = 7  # whole numbers before the weights
FIRST_MERGED = 259  # after the special tokens and the bytes

# What llama2.c prints at temperature 0 (its doc/stories260K.md).
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She said, \"I want to "
    "play with your ball, but I can't find it.\"\n"
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\n"
    "Lily didn't want to help her mom, so she said, \"I'm sorry, mom. I didn't know what to do.\" Her mom said, "
    "\"Don't worry, Lily. We can help you."
)
SHUFFLED = " ".join(random.Random(0).sample(STORY.split(), len(STORY.split())))


@torch.inference_mode()
def text_loss(model: torch.nn.Module, text: str) -> float:
    """Nats per token of a text."""
    tokens = torch.tensor([model.tokenizer(text)["input_ids"]])
    return F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:]).item()


def story_recipe(folder: Path) -> CausalLM:
    """The model's recipe, after its weights and its tokenizer were written to a folder."""
    dim, hidden, num_layers, num_heads, num_groups, num_tokens, length = read_header()
    save_file(read_weights(), folder / "model.safetensors")
    write_tokenizer(folder)
    return CausalLM(
        weights=str(folder / "model.safetensors"),
        configuration={
            "model_type": "llama",
            "vocab_size": num_tokens,
            "hidden_size": dim,
            "intermediate_size": hidden,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_groups,
            "max_position_embeddings": length,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    )


def read_header() -> list[int]:
    """Width, width of the MLP, numbers of layers, heads, heads of keys, and tokens, and the longest sequence."""
    return np.fromfile(WEIGHTS, dtype=np.int32, count=HEADER).tolist()


def read_weights() -> dict[str, torch.Tensor]:
    """The tensors under transformers' names, with its rotary pairs: the two halves of a head."""
    dim, hidden, num_layers, num_heads, num_groups, num_tokens, length = read_header()
    assert num_tokens > 0, "a classifier of its own would follow"
    size = dim // num_heads
    stream = torch.from_numpy(np.fromfile(WEIGHTS, dtype=np.float32, offset=4 * HEADER))

    def take(*shape: int) -> torch.Tensor:
        nonlocal stream
        tensor, stream = stream[: np.prod(shape)].reshape(shape), stream[np.prod(shape) :]
        return tensor

    def halves(weight: torch.Tensor) -> torch.Tensor:
        """Rows of pairs `(0, 1), (2, 3), ...` of each head in the order `0, 2, ..., 1, 3, ...`."""
        return weight.view(num_layers, -1, size // 2, 2, dim).transpose(2, 3).reshape(weight.shape)

    tensors = {"model.embed_tokens.weight": take(num_tokens, dim)}
    layers = {
        "input_layernorm": take(num_layers, dim),
        "self_attn.q_proj": halves(take(num_layers, dim, dim)),
        "self_attn.k_proj": halves(take(num_layers, num_groups * size, dim)),
        "self_attn.v_proj": take(num_layers, num_groups * size, dim),
        "self_attn.o_proj": take(num_layers, dim, dim),
        "post_attention_layernorm": take(num_layers, dim),
        "mlp.gate_proj": take(num_layers, hidden, dim),
        "mlp.down_proj": take(num_layers, dim, hidden),
        "mlp.up_proj": take(num_layers, hidden, dim),
    }
    tensors["model.norm.weight"] = take(dim)
    take(2, length, size // 2)  # cosines and sines, which transformers computes
    assert not len(stream)
    for name, stacked in layers.items():
        tensors |= {f"model.layers.{number}.{name}.weight": weight for number, weight in enumerate(stacked)}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def read_pieces() -> dict[str, float]:
    """The vocabulary with its scores: special tokens, the 256 bytes, and merges, the higher its score the sooner."""
    content, place, found = PIECES.read_bytes(), 4, []
    while place < len(content):
        score, length = struct.unpack_from("fi", content, place)
        place += 8 + length
        found.append((content[place - length : place].decode(), score))
    return dict([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *found[3:]])


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    scores = read_pieces()
    number = {piece: place for place, piece in enumerate(scores)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted([*scores][FIRST_MERGED:], key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in number and piece[cut:] in number
    ]
    tokenizer = Tokenizer(models.BPE(number, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
