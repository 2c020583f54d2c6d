"""Checkpoints of language models: one file or several, tied or not, with a tokenizer beside them or without."""

from tests.language import installed  # noqa: F401, I001

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from facts.utils.cache import content_key
from facts.models import CausalLM, weights
from experiments.mini.language import new_tokenizer
from facts.modules.networks import run
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"configuration": CONFIGURATIONS["llama"], "weights": "pretrained"}, "without a tag"),
        ({"configuration": CONFIGURATIONS["llama"], "arguments": {"num_layer": 1}}, "llama has no field num_layer"),
    ],
)
def test_recipes_that_build_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        CausalLM(**{"weights": "random", **fields}).build()


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    _, recipe = saved("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["other"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    message = "lm_head.weight: .* instead of .*; model.norm.weight is missing; other is unexpected"
    with pytest.raises(ValueError, match=f"does not fit this LlamaForCausalLM: 3 tensors differ.*{message}"):
        recipe.build()


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
