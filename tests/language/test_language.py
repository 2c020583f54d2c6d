"""Language models of several architectures, from checkpoints to folders; texts, benchmarks and cells; Qwen3-1.7B."""

from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("accelerate", "datasets", "lm_eval", "tokenizers", "transformers"))):  # slow to import
    pytest.skip("the extra `llm` is not installed: make install-llm", allow_module_level=True)

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace
from statistics import stdev

import torch
import transformers
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

import facts
from experiments.mini.language import CHOICES, KINDS, PythonReference, new_tokenizer, paragraphs, questions
from experiments.mini.train import main, mini_recipe
from experiments.runner import run_cell
from facts.models import CausalLM, weights
from facts.modules.forms import PLAIN
from facts.modules.linear_calls import with_linear_layers
from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import run
from facts.moments.losses import NOTHING, next_tokens
from facts.parts.layers import select_layers
from facts.tasks.language import Corpus, losses_of_windows, perplexity, perplexity_of
from facts.utils import hub
from facts.utils.cache import content_key
from tests.refusals import refuses

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


TOKENS = sequences()[0][0]
GENERATE = """
import json, sys, facts
network = facts.load_compressed(sys.argv[1]).model
prompt = network.tokenizer(sys.argv[2], return_tensors="pt")
found = network.generate(**prompt, max_new_tokens=20, do_sample=False, use_cache=True, pad_token_id=0)
print(json.dumps(found[0].tolist()))
"""


@pytest.mark.system
def test_a_fresh_process_generates_the_same_text(tmp_path):
    model = build("qwen3", vocab_size=300)
    model.tokenizer = new_tokenizer("a cat sat on a mat and a bat sat on a hat " * 20, 300)
    model.generation_config.repetition_penalty = 1.5  # to be kept
    result = facts.compress(model, sequences(), ratio=0.6)
    facts.save_compressed(result, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".safetensors"}
    prompt = result.model.tokenizer("a cat sat", return_tensors="pt")
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    ours, other = (result.model.generate(**prompt, **settings, use_cache=use)[0].tolist() for use in (True, False))
    assert len(set(ours)) > 5 and ours == other
    command = [sys.executable, "-c", GENERATE, tmp_path, "a cat sat"]
    assert json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == ours


OWN_PARTS = sorted(CONFIGURATIONS.keys() - {"llama", "biogpt"})  # these two have the parts of others


@pytest.mark.parametrize(("kind", "parts"), [("qwen3", "layers"), *((kind, "units") for kind in OWN_PARTS)])
def test_the_same_logits_after_loading(kind, parts, tmp_path):
    result = facts.compress(build(kind), sequences(), estimator="pela", search="uniform", parts=parts, ratio=0.6)
    assert bool(result.summary.widths) == (parts == "units")
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path)
    assert torch.equal(run(loaded.model, TOKENS), run(result.model, TOKENS))
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
    model = build(kind)
    form = "pivoted" if kind == "llama" else "plain"
    result = facts.compress(model, estimator="pela", form=form, ratio=0.5, cost="params")
    assert len(result.plan) == LAYERS[kind]
    assert not any(part in name for name in result.plan for part in ("head", "embed", "output_projection"))
    compressed = {name for name, module in result.model.named_modules() if isinstance(module, LowRankLayer)}
    assert compressed == set(result.plan)
    assert run(result.model, TOKENS).isfinite().all() and run(result.model, TOKENS).shape == (3, 12, 64)
    assert result.summary.spent["params"] <= result.summary.budget["params"]
    own = {parameter for parameter in model.parameters()}  # tied embeddings count once
    assert facts.count_cost(model, (1, 12)).params == sum(parameter.numel() for parameter in own)


def test_gpt2_s_layers_become_linear_ones_that_compute_the_same():
    configuration = transformers.AutoConfig.for_model(**CONFIGURATIONS["gpt2"])
    original = transformers.AutoModelForCausalLM.from_config(configuration).eval()
    before = copy.deepcopy(original.state_dict())
    changed = with_linear_layers(original)
    assert torch.allclose(run(changed, TOKENS), run(original, TOKENS), atol=1e-6)  # the order of a sum, in float32
    assert changed.lm_head.weight is changed.transformer.wte.weight
    assert all(before[name].equal(tensor) for name, tensor in original.state_dict().items())
    plan = facts.compress(original, sequences(), parts="layers").plan  # no need to change it oneself
    assert plan.keys() == select_layers(changed).layers.keys() and len(plan) == LAYERS["gpt2"]
    assert facts.count_cost(original, (1, 12)) == facts.count_cost(changed, (1, 12))


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


@pytest.mark.external
def test_layers_parameters_and_operations_of_qwen3(cell_config):
    with torch.device("meta"):
        qwen3 = instantiate(OmegaConf.merge(cell_config("model=qwen3_1_7b").model.paper, {"weights": "random"})).build()
    layers = select_layers(qwen3).layers
    expected = {f"model.layers.{i}.{name}": shape for i in range(28) for name, shape in PER_BLOCK.items()}
    assert {name: tuple(layer.weight.shape) for name, layer in layers.items()} == expected
    linear = 28 * sum(m * n for m, n in PER_BLOCK.values())
    dense = facts.count_cost(qwen3, (1, 2048))
    assert dense.params == linear + EMBEDDINGS + NORMS == 1_720_574_976  # 1.7 billion; 1.4 without the embeddings
    assert dense.flops == 2 * 2048 * (linear + EMBEDDINGS)  # the head shares their weights

    for name, layer in layers.items():
        qwen3.set_submodule(name, PLAIN.empty(layer, PLAIN.rank_of_ratio(layer.out_features, layer.in_features, 0.7)))
    small = facts.count_cost(qwen3, (1, 2048))
    kept = 28 * sum(int(m * n // (m + n) * 0.7) * (m + n) for m, n in PER_BLOCK.values())
    assert (small.params, small.flops) == (kept + EMBEDDINGS + NORMS, 2 * 2048 * (kept + EMBEDDINGS))
    assert 0.69 < kept / linear <= 0.7


@pytest.fixture(scope="module")
def task():
    return PythonReference(num_calibration=20, num_sensitivity=4, batch_size=8, num_questions=6, num_factors=16)


@pytest.fixture(scope="module")
def model(task):
    network = build("llama", vocab_size=300)
    network.tokenizer = new_tokenizer(task.text("training"), 300)
    return network


def test_no_paragraph_is_there_twice(task):
    texts = [" ".join(text.split()) for split in ("training", "evaluation") for text in paragraphs(split)]
    assert len({*texts}) == len(texts)
    assert 4 < len(task.text("training")) / len(task.text("evaluation")) < 6


def test_calibration_and_sensitivity_share_no_window(task, model):
    batches = task.calibration(model), task.sensitivity(model)
    calibration, sensitivity = ({tuple(row.tolist()) for tokens, _ in each for row in tokens} for each in batches)
    assert (len(calibration), len(sensitivity)) == (20, 4) and not calibration & sensitivity
    tokens, targets = task.calibration(model)[0]
    assert tokens.shape == (8, 128)
    assert torch.equal(targets[:, :-1], tokens[:, 1:]) and (targets[:, -1] == NOTHING).all()
    refuses(r"LlamaForCausalLM has no tokenizer: set model\.tokenizer", task.calibration, build("llama"))
    (small := build("llama")).resize_token_embeddings(9)
    small.tokenizer = model.tokenizer
    refuses("LlamaForCausalLM knows 9 tokens, and its tokenizer gives number", task.calibration, small)
    with pytest.raises(ValueError, match="needs 100016 windows of 128 tokens; the evaluation text has"):
        replace(task, num_held_out=100_000).analysis(model)


@pytest.mark.parametrize("rest", [0, 1, 127])
def test_every_epoch_has_as_many_batches(tmp_path, model, rest):
    """Though a text cut elsewhere may have one window less."""
    (tmp_path / "text").write_text("words and words and other words " * 100)
    length = (len(model.tokenizer((tmp_path / "text").read_text())["input_ids"]) - rest) // 3
    corpus = Corpus(training_text=str(tmp_path / "text"), evaluation_text="", sequence_length=length)
    epochs = [corpus.training(model, epoch, seed=5) for epoch in range(12)]
    assert {len(batches) for batches in epochs} == ({2} if rest < length - 1 else {3})
    assert len(replace(corpus, sequence_length=length * 3 + rest).training(model, 0)) == 1
    refuses("tokens does not fill a window of 10000", replace(corpus, sequence_length=10000).training, model, 0)


def test_perplexity_is_that_of_transformers_own_loss(task, model):
    batches = task.evaluation(model)[:3]
    losses = [model(tokens, labels=tokens).loss.item() for tokens, _ in batches]
    assert perplexity(model, batches) == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)
    sums, counts = losses_of_windows(model, batches)
    assert (sums / counts).view(3, -1).mean(dim=1).tolist() == pytest.approx(losses, rel=1e-5)
    resampled = torch.distributions.Multinomial(len(sums), torch.ones_like(sums)).sample((4000,))
    spread = ((resampled @ sums) / (resampled @ counts)).exp().std().item()  # the bootstrap's
    assert perplexity_of(sums, counts)[1] == pytest.approx(spread, rel=0.15)  # which divides by N, not N - 1


@pytest.mark.parametrize("kind", KINDS)
def test_questions_have_one_right_answer_which_the_text_contains(kind):
    text = " ".join(" ".join(paragraph.split()) for paragraph in paragraphs("evaluation"))
    made = questions(kind, paragraphs("evaluation"), 100, seed=0)
    assert len(made) == 100 and made == questions(kind, paragraphs("evaluation"), 100, seed=0)
    assert made != questions(kind, paragraphs("evaluation"), 100, seed=1)
    for question in made:
        assert len(set(question["choices"])) == CHOICES
        whole = [f"{question['context']} {choice}" in text for choice in question["choices"]]
        assert whole[question["answer"]] and sum(whole) == 1
    assert len({question["answer"] for question in made}) == CHOICES


@pytest.mark.system  # as all that runs lm-eval, which takes seconds to import
def test_accuracy_is_that_of_the_likeliest_choice_and_nothing_else_changes(task, model):
    model.tokenizer.pad_token = None
    torch.manual_seed(3)
    found = task.evaluate(model)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1)) and model.tokenizer.pad_token is None
    assert found["accuracy"] == pytest.approx(sum(found[f"accuracy_{kind}"] for kind in KINDS) / len(KINDS))
    errors = []
    for kind in KINDS:
        made = questions(kind, paragraphs("evaluation"), 6, task.seed)
        right = [_likeliest(model, question) == question["answer"] for question in made]
        assert found[f"accuracy_{kind}"] == pytest.approx(100 * sum(right) / 6)
        errors.append(100 * stdev(right) / 6**0.5)
    assert found["accuracy_error"] == pytest.approx(math.hypot(*errors) / len(KINDS))
    assert "accuracy_error" not in replace(task, num_questions=1).evaluate(model)


def _likeliest(model, question):
    context = model.tokenizer(question["context"])["input_ids"]
    likelihoods = []
    for choice in question["choices"]:
        tokens = model.tokenizer(f"{question['context']} {choice}")["input_ids"]
        with torch.no_grad():
            log_probabilities = run(model, torch.tensor([tokens])).log_softmax(-1)[0]
        likelihoods.append(sum(log_probabilities[i - 1, tokens[i]].item() for i in range(len(context), len(tokens))))
    return max(range(CHOICES), key=likelihoods.__getitem__)


def test_the_key_depends_on_text_windows_and_questions(task, model, tmp_path, written):
    keys = {replace(task, **change).content_key(model) for change in ({}, {"seed": 1}, {"num_questions": 13})}
    other = build("llama", vocab_size=300)
    other.tokenizer = new_tokenizer(task.text("evaluation"), 300)
    assert len({*keys, task.content_key(other)}) == 4
    corpus = Corpus(training_text="", evaluation_text="", benchmark_names=("mine",), benchmark_folder=written)
    before = corpus.benchmarks_key
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "records.pyc").write_bytes(b"compiled")
    assert corpus.benchmarks_key == before
    (tmp_path / "mine.yaml").write_text("task: yours")
    assert corpus.benchmarks_key != before


@pytest.mark.system
def test_texts_and_benchmarks_in_files(tmp_path, model, written):
    for split in ("training", "evaluation"):
        (tmp_path / split).write_text(f"the {split} of a text " * 200, encoding="utf-8")
    files = {f"{split}_text": str(tmp_path / split) for split in ("training", "evaluation")}
    corpus = Corpus(**files, sequence_length=16, num_calibration=4, num_sensitivity=2)
    assert corpus.inspect().count("bytes") == 2
    assert corpus.evaluate(model).keys() == {"perplexity", "perplexity_error"}
    with pytest.raises(FileNotFoundError, match=r"no text .*nowhere"):
        replace(corpus, training_text=str(tmp_path / "nowhere")).inspect()
    quiz = replace(corpus, benchmark_names=("quiz",), benchmark_folder=written)
    assert quiz.inspect().endswith("1 benchmarks")
    made = questions("word", paragraphs("evaluation"), 8, 0)
    right = [_likeliest(model, question) == question["answer"] for question in made]
    assert quiz.evaluate(model)["accuracy_quiz"] == pytest.approx(100 * sum(right) / 8)
    with pytest.raises(ValueError, match=r"no benchmark is called yours in .*, which describes mine, quiz"):
        replace(quiz, benchmark_names=("mine", "yours")).inspect()
    refuses("reports no accuracy for mine", replace(quiz, benchmark_names=("mine",)).evaluate, model)


@pytest.fixture
def written(tmp_path):
    """A folder with a benchmark of multiple choice, `quiz`, and one of likelihoods, `mine`."""
    made = questions("word", paragraphs("evaluation"), 8, 0)
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(question)}\n" for question in made))
    source = {"data_files": {"test": f"{tmp_path}/questions.jsonl"}, "cache_dir": str(tmp_path)}
    shared = {"dataset_path": "json", "dataset_kwargs": source, "test_split": "test", "doc_to_text": "context"}
    quiz = {"output_type": "multiple_choice", "doc_to_target": "answer", "doc_to_choice": "choices"}
    quiz["metric_list"] = [{"metric": "acc"}]
    mine = {"output_type": "loglikelihood", "doc_to_target": "context", "metric_list": [{"metric": "perplexity"}]}
    for name, own in (("quiz", quiz), ("mine", mine)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **own}))  # which is YAML too
    return str(tmp_path)


@pytest.mark.system
def test_without_the_hub_texts_questions_and_configurations_are_errors_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its tries
    source = "hub:nobody/nothing/plain/test"
    corpus = Corpus(training_text=source, evaluation_text=source)
    for look in (corpus.inspect, lambda: corpus.text("evaluation")):
        refuses(r"Connect the machine .* or give the text as a file", look, raised=ConnectionError)
    with pytest.raises(ValueError, match="hub:OWNER/DATASET/CONFIGURATION/SPLIT, got 'hub:wikitext'"):
        replace(corpus, evaluation_text="hub:wikitext").text("evaluation")
    message = "configuration of nobody/nothing could not be fetched"
    refuses(message, CausalLM(tag="nobody/nothing", weights="random").build, raised=FileNotFoundError)
    (tmp_path / "text").write_text("a text")
    files = {"training_text": str(tmp_path / "text"), "evaluation_text": str(tmp_path / "text")}
    refuses("or benchmark_names", Corpus(**files, benchmark_names=("piqa",)).inspect, raised=ConnectionError)


LANGUAGE = ("model=qwen3_1_7b", "task=language", "ratio=0.7", "cost=params")


@pytest.mark.system
def test_the_small_model_predicts_the_text_and_answers_questions(make_cell):
    record = run_cell(make_cell(*LANGUAGE, "estimator=none", "task.mini.num_questions=50"))
    assert record.metrics["perplexity"] < 35.4 / 2  # 35.4 by counting pairs of tokens (Witten and Bell)
    assert record.metrics["accuracy"] > 50  # chance is 25
    assert record.weights["source"] == "model.safetensors"


@pytest.mark.system
def test_a_cell_runs_to_its_record_and_is_not_run_again(make_cell):
    few = ("task.mini.num_calibration=8", "task.mini.num_sensitivity=4", "task.mini.num_questions=8")
    overrides = (*LANGUAGE, *few, "estimator=facts", "labels=sampled", "search=cors")
    record = run_cell(make_cell(*overrides))
    assert (record.status, len(record.plan)) == ("done", 28) and record.metrics["mparams"] < 0.85
    assert 14 < record.metrics["perplexity"] < 100
    assert {"accuracy", "accuracy_ending", "accuracy_word", "accuracy_order"} <= record.metrics.keys()
    assert run_cell(make_cell(*overrides)).time == record.time


@pytest.mark.system
def test_training_it_again_writes_weights_and_tokenizer(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.mini.train.EPOCHS_OF_TEXT", 1)
    training = PythonReference.training
    monkeypatch.setattr(PythonReference, "training", lambda *given, **options: training(*given, **options)[:5])
    main(["qwen3_1_7b", "--folder", str(tmp_path)])
    assert "perplexity" in capsys.readouterr().out
    weights = tmp_path / "mini_qwen3" / "model.safetensors"
    assert weights.stat().st_size < 6e6
    again, shipped = mini_recipe("qwen3_1_7b", weights=str(weights)).build(), mini_recipe("qwen3_1_7b").build()
    assert again.tokenizer.get_vocab() == shipped.tokenizer.get_vocab()
    assert again.tokenizer.decode(again.tokenizer(text := "one; and äöü")["input_ids"]) == text
