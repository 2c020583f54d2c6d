"""The small trained networks of the package that the examples take, so that they run without a download."""

from torch import nn

from facts.models import CausalLM, TimmModel


def small_deit() -> nn.Module:
    """A DeiT of six blocks for images `[N, 1, 16, 16]`, trained on the hundred digits of `experiments.mini.digits`."""
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 6, "num_heads": 4}
    overlay = {"pretrained_cfg_overlay": {"input_size": [1, 16, 16]}}
    return TimmModel(
        tag="deit_tiny_patch16_224",
        weights="experiments/mini/checkpoints/mini_deit_plain.safetensors",
        arguments={**overlay, **sizes, "in_chans": 1, "num_classes": 100},
    ).build()


def small_qwen() -> nn.Module:
    """A language model of Qwen3's architecture, with its tokenizer; it was trained on Python's reference in English."""
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_theta": 10000}
    tokens = {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}
    return CausalLM(
        weights="experiments/mini/checkpoints/mini_qwen3/model.safetensors",
        configuration={"model_type": "qwen3", **sizes, **heads, **tokens},
    ).build()
