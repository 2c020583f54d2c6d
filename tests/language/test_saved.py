"""Language models of several architectures: compressed, in a folder, and in a fresh process."""

from tests.language import installed  # noqa: F401

# isort: split

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers

import facts
from experiments.mini.language import new_tokenizer
from facts.cost.count import count_cost
from facts.modules.linear_calls import with_linear_layers
from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import run
from facts.parts.layers import select_layers
from tests.language.architectures import CONFIGURATIONS, LAYERS, NUM_TOKENS, build, sequences

GENERATE = """
import json, sys, facts
network = facts.load_compressed(sys.argv[1]).model
prompt = network.tokenizer(sys.argv[2], return_tensors="pt")
found = network.generate(**prompt, max_new_tokens=20, do_sample=False, use_cache=True, pad_token_id=0)
print(json.dumps(found[0].tolist()))
"""
KINDS = sorted(CONFIGURATIONS.keys() - {"llama", "biogpt"})  # these two have the parts of others
TEXT = "a cat sat on a mat and a bat sat on a hat " * 20


@pytest.mark.system
def test_a_fresh_process_generates_the_same_text(tmp_path):
    model = build("qwen3", vocab_size=300)
    model.tokenizer = new_tokenizer(TEXT, 300)
    model.generation_config.repetition_penalty = 1.5  # to be kept
    result = facts.compress(model, sequences(), ratio=0.6)
    facts.save_compressed(result, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".safetensors"}

    prompt = result.model.tokenizer("a cat sat", return_tensors="pt")
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    ours = result.model.generate(**prompt, **settings, use_cache=True)[0].tolist()
    assert len(set(ours)) > 5
    assert result.model.generate(**prompt, **settings, use_cache=False)[0].tolist() == ours
    command = [sys.executable, "-c", GENERATE, tmp_path, "a cat sat"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(printed) == ours


@pytest.mark.parametrize(("kind", "parts"), [("qwen3", "layers"), *((kind, "units") for kind in KINDS)])
def test_the_same_logits_after_loading(kind, parts, tmp_path):
    result = facts.compress(build(kind), sequences(), estimator="pela", search="uniform", parts=parts, ratio=0.6)
    assert bool(result.summary.widths) == (parts == "units")
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path)
    tokens = sequences()[0][0]
    assert torch.equal(run(loaded.model, tokens), run(result.model, tokens))
    assert (loaded.plan, loaded.summary) == (result.plan, result.summary)
    assert loaded.model.recipe.configuration["vocab_size"] == NUM_TOKENS


@pytest.mark.parametrize("rotations", [torch.float32, torch.bfloat16])
def test_rotations_of_half_precision_networks_keep_their_type(rotations, tmp_path):
    """They are in no file; in bfloat16, far positions have others."""
    result = facts.compress(build("llama", max_position_embeddings=2048), estimator="pela", ratio=0.6)
    frequencies = result.model.model.rotary_emb.inv_freq
    result.model.to(torch.bfloat16)
    result.model.model.rotary_emb.inv_freq = frequencies.to(rotations)
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path).model
    assert loaded.model.rotary_emb.inv_freq.dtype == rotations
    tokens = torch.randint(NUM_TOKENS, (1, 2000))
    assert torch.equal(run(loaded, tokens), run(result.model, tokens))


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_every_linear_layer_of_the_blocks_is_compressed_and_nothing_else(kind):
    model, tokens = build(kind), sequences()[0][0]
    form = "pivoted" if kind == "llama" else "plain"
    result = facts.compress(model, estimator="pela", form=form, ratio=0.5, cost="params")
    assert len(result.plan) == LAYERS[kind]
    assert not any(part in name for name in result.plan for part in ("head", "embed", "output_projection"))
    compressed = {name for name, module in result.model.named_modules() if isinstance(module, LowRankLayer)}
    assert compressed == set(result.plan)
    assert run(result.model, tokens).isfinite().all() and run(result.model, tokens).shape == (3, 12, 64)
    assert result.summary.spent["params"] <= result.summary.budget["params"]
    own = {parameter for parameter in model.parameters()}  # tied embeddings count once
    assert facts.count_cost(model, (1, 12)).params == sum(parameter.numel() for parameter in own)


def test_gpt2_s_layers_become_linear_ones_that_compute_the_same():
    configuration = transformers.AutoConfig.for_model(**CONFIGURATIONS["gpt2"])
    original = transformers.AutoModelForCausalLM.from_config(configuration).eval()
    before = copy.deepcopy(original.state_dict())
    changed = with_linear_layers(original)
    tokens = sequences()[0][0]
    assert torch.allclose(run(changed, tokens), run(original, tokens), atol=1e-6)  # the order of a sum, in float32
    assert changed.lm_head.weight is changed.transformer.wte.weight
    assert all(before[name].equal(tensor) for name, tensor in original.state_dict().items())
    assert len(select_layers(changed).layers) == LAYERS["gpt2"]
    result = facts.compress(original, sequences(), parts="layers")  # no need to change it oneself
    assert result.plan.keys() == select_layers(changed).layers.keys()
    assert count_cost(original, (1, 12)) == count_cost(changed, (1, 12))
