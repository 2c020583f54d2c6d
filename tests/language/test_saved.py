"""A compressed language model in a folder, and what a fresh process makes of it."""

from tests.language import installed  # noqa: F401, I001

import json
import subprocess
import sys

import pytest
import torch

import facts
from facts.models.causal_lm import new_tokenizer
from facts.modules.networks import run
from tests.language.architectures import CONFIGURATIONS, NUM_TOKENS, build, sequences

GENERATE = """
import json, sys, facts
network = facts.load_compressed(sys.argv[1]).model
prompt = network.tokenizer(sys.argv[2], return_tensors="pt")
found = network.generate(**prompt, max_new_tokens=20, do_sample=False, use_cache=True, pad_token_id=0)
print(json.dumps(found[0].tolist()))
"""
TEXT = "a cat sat on a mat and a bat sat on a hat " * 20


@pytest.mark.system
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_fresh_process_generates_the_same_text(kind, tmp_path):
    model = build(kind, vocab_size=300)
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


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_the_same_logits_after_loading(kind, tmp_path):
    result = facts.compress(build(kind), sequences(), ratio=0.6)
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path)
    tokens = sequences()[0][0]
    with torch.no_grad():
        assert torch.equal(run(loaded.model, tokens), run(result.model, tokens))
    assert (loaded.plan, loaded.summary) == (result.plan, result.summary)
    assert loaded.model.recipe.configuration["vocab_size"] == NUM_TOKENS


def test_half_precision_keeps_what_is_computed_in_float32(tmp_path):
    """Rotations are in no file; in bfloat16 those of far positions would be others."""
    model = build("llama", max_position_embeddings=2048)
    result = facts.compress(model, sequences(), ratio=0.6)
    rotations = result.model.model.rotary_emb.inv_freq
    result.model.to(torch.bfloat16)
    result.model.model.rotary_emb.inv_freq = rotations  # as transformers has it in such a model
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path).model
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    tokens = torch.randint(NUM_TOKENS, (1, 2000))
    with torch.no_grad():
        assert torch.equal(run(loaded, tokens), run(result.model, tokens))


@pytest.mark.system
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2"])
def test_rotations_in_half_precision_stay_so(kind, tmp_path):
    result = facts.compress(build(kind, max_position_embeddings=2048), sequences(), ratio=0.6)
    result.model.bfloat16()
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path).model
    tokens = torch.randint(NUM_TOKENS, (1, 2000))
    with torch.no_grad():
        assert torch.equal(run(loaded, tokens), run(result.model, tokens))


def test_no_code_in_a_folder_is_run(tmp_path):
    model = build("llama", vocab_size=300)
    model.tokenizer = new_tokenizer(TEXT, 300)
    facts.save_compressed(facts.compress(model, sequences()), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}, "tokenizer_class": "Mine"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'it_ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ValueError, match=r"mine\.py has an unknown file type"):
        facts.load_compressed(tmp_path)
    (tmp_path / "mine.py").unlink()
    with pytest.raises(ValueError, match=r"tokenizer_config\.json sets auto_map, which"):
        facts.load_compressed(tmp_path)
    assert not (tmp_path / "it_ran").exists()


def test_a_model_of_one_s_own_needs_no_recipe(tmp_path):
    import transformers

    configuration = transformers.AutoConfig.for_model(**CONFIGURATIONS["gpt2"])
    model = transformers.AutoModelForCausalLM.from_config(configuration).eval()
    result = facts.compress(model, sequences(), ratio=0.6)
    facts.save_compressed(result, tmp_path)
    tokens = sequences()[0][0]
    for loaded in (facts.load_compressed(tmp_path), facts.load_compressed(tmp_path, model)):
        with torch.no_grad():
            assert torch.equal(run(loaded.model, tokens), run(result.model, tokens))


def test_no_code_is_fetched_for_an_unknown_architecture(tmp_path):
    facts.save_compressed(facts.compress(build("llama"), sequences()), tmp_path)
    description = json.loads((tmp_path / "compression.json").read_text())
    description["recipe"]["configuration"] |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "a.B"}}
    (tmp_path / "compression.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="sets auto_map to"):
        facts.load_compressed(tmp_path)
    del description["recipe"]["configuration"]["auto_map"]
    (tmp_path / "compression.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="knows no model_type 'mine'"):
        facts.load_compressed(tmp_path)
