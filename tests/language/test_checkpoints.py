"""Checkpoints of language models, one file or several, tied or not; and Qwen3-1.7B at full size."""

from tests.language import installed  # noqa: F401

# isort: split

from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from experiments.mini.language import new_tokenizer
from facts.cost.count import count_cost
from facts.models import CausalLM, weights
from facts.modules.forms import PLAIN
from facts.modules.networks import run
from facts.parts.layers import select_layers
from facts.utils.cache import content_key
from tests.language.architectures import CONFIGURATIONS, build, sequences

TOKENS = sequences()[0][0]


def saved(kind, folder, **settings):
    """A model that transformers wrote into a folder, the recipe that reads it, and the model itself."""
    model = build(kind)
    model.save_pretrained(folder, **settings)
    return model, CausalLM(configuration=CONFIGURATIONS[kind], weights=str(folder / "model.safetensors"))


def test_one_file_or_several_in_a_folder_of_many_networks(tmp_path):
    model, recipe = saved("qwen3", tmp_path / "one")
    _, several = saved("qwen3", tmp_path / "several", max_shard_size="20KB")
    index = tmp_path / "several" / "model.safetensors.index.json"
    recipes = [replace(recipe, tag=f"someone/{name}", weights=str(tmp_path)) for name in ("one", "several")]
    for found in (recipe, replace(several, weights=str(index)), *recipes):
        loaded = found.build()
        assert torch.equal(run(loaded, TOKENS), run(model, TOKENS))
        assert not hasattr(loaded, "tokenizer") and not loaded.training
    parts = weights.weight_files(index)
    assert len(recipes[1].provenance()["sha256"].split()) == len(parts) > 1
    parts[0].unlink()
    with pytest.raises(FileNotFoundError):
        recipes[1].build()


def test_files_in_half_precision_and_with_tied_weights_twice(tmp_path):
    model, recipe = saved("qwen3", tmp_path)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = recipe.build()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.allclose(run(loaded, TOKENS), run(model, TOKENS), atol=0.1 * run(model, TOKENS).abs().max().item())


def test_the_tokenizer_beside_the_weights(tmp_path):
    _, recipe = saved("llama", tmp_path)
    tokenizer = new_tokenizer("one two three four " * 50, 280)
    tokenizer.save_pretrained(tmp_path)
    text = "three two one; and äöü"
    tokens = recipe.build().tokenizer(text)["input_ids"]
    assert tokens == tokenizer(text)["input_ids"] and recipe.build().tokenizer.decode(tokens) == text


def test_what_a_network_computes_by_is_part_of_its_key():
    """Neither weights nor names tell how far positions are turned, or in how many heads."""
    plain = build("llama")
    turned = build("llama", rope_parameters={"rope_theta": 5.0, "rope_type": "default"})
    assert not torch.allclose(run(plain, TOKENS), run(turned, TOKENS))
    heads = build("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    assert len({content_key(model) for model in (plain, turned, heads)}) == 3
    assert content_key(plain) == content_key(build("llama"))


ATTENTION, MLP = {"q": (2048, 2048), "k": (1024, 2048), "v": (1024, 2048), "o": (2048, 2048)}, (6144, 2048)
PER_BLOCK = {f"self_attn.{name}_proj": shape for name, shape in ATTENTION.items()}
PER_BLOCK |= {"mlp.gate_proj": MLP, "mlp.up_proj": MLP, "mlp.down_proj": MLP[::-1]}
EMBEDDINGS, NORMS = 151936 * 2048, 28 * (2 * 2048 + 2 * 128) + 2048


@pytest.fixture
def qwen3(cell_config):
    node = OmegaConf.merge(cell_config("model=qwen3_1_7b").model.paper, {"weights": "random"})
    with torch.device("meta"):
        return instantiate(node).build()


@pytest.mark.external
def test_layers_parameters_and_operations(qwen3):
    layers = select_layers(qwen3).layers
    expected = {f"model.layers.{i}.{name}": shape for i in range(28) for name, shape in PER_BLOCK.items()}
    assert {name: tuple(layer.weight.shape) for name, layer in layers.items()} == expected
    linear = 28 * sum(m * n for m, n in PER_BLOCK.values())
    dense = count_cost(qwen3, (1, 2048))
    assert dense.params == linear + EMBEDDINGS + NORMS == 1_720_574_976  # 1.7 billion; 1.4 without the embeddings
    assert dense.flops == 2 * 2048 * (linear + EMBEDDINGS)  # the head shares their weights

    for name, layer in layers.items():
        rank = PLAIN.rank_of_ratio(layer.out_features, layer.in_features, 0.7)
        qwen3.set_submodule(name, PLAIN.empty(layer, rank))
    small = count_cost(qwen3, (1, 2048))
    kept = 28 * sum(int(m * n // (m + n) * 0.7) * (m + n) for m, n in PER_BLOCK.values())
    assert small.params == kept + EMBEDDINGS + NORMS
    assert small.flops == 2 * 2048 * (kept + EMBEDDINGS)
    assert 0.69 < kept / linear <= 0.7
