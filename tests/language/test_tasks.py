"""Texts, windows, perplexities and benchmarks; and the small language model in cells of experiments."""

from tests.language import installed  # noqa: F401

# isort: split

import json
import math
from dataclasses import replace

import pytest
import torch

from experiments.mini.language import CHOICES, KINDS, PythonReference, new_tokenizer, paragraphs, questions
from experiments.mini.train import main, mini_recipe
from experiments.runner import run_cell
from facts.models import CausalLM
from facts.modules.networks import run
from facts.moments.losses import NOTHING
from facts.tasks.language import Corpus, losses_of_windows, perplexity
from facts.utils import hub
from tests.language.architectures import build
from tests.refusals import refuses

NUM_TOKENS = 300


@pytest.fixture(scope="module")
def task():
    return PythonReference(num_calibration=20, num_sensitivity=4, batch_size=8, num_questions=6, num_factors=16)


@pytest.fixture(scope="module")
def model(task):
    network = build("llama", vocab_size=NUM_TOKENS)
    network.tokenizer = new_tokenizer(task.text("training"), NUM_TOKENS)
    return network


def rows_of(batches):
    return {tuple(row.tolist()) for tokens, _ in batches for row in tokens}


def test_no_paragraph_is_there_twice(task):
    texts = [" ".join(text.split()) for split in ("training", "evaluation") for text in paragraphs(split)]
    assert len({*texts}) == len(texts)
    assert 4 < len(task.text("training")) / len(task.text("evaluation")) < 6


def test_calibration_and_sensitivity_share_no_window(task, model):
    calibration, sensitivity = rows_of(task.calibration(model)), rows_of(task.sensitivity(model))
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
    for kind in KINDS:
        made = questions(kind, paragraphs("evaluation"), 6, task.seed)
        right = [_likeliest(model, question) == question["answer"] for question in made]
        assert found[f"accuracy_{kind}"] == pytest.approx(100 * sum(right) / 6)


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
    other = build("llama", vocab_size=NUM_TOKENS)
    other.tokenizer = new_tokenizer(task.text("evaluation"), NUM_TOKENS)
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
    assert corpus.evaluate(model).keys() == {"perplexity"}
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
        task = {"task": name, **shared, **own}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML too
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
FEW = ("task.mini.num_calibration=8", "task.mini.num_sensitivity=4", "task.mini.num_questions=8")


def cell_of(make_cell, *overrides):
    return run_cell(make_cell(*LANGUAGE, *FEW, *overrides))


@pytest.mark.system
def test_the_small_model_predicts_the_text_and_answers_questions(make_cell):
    record = run_cell(make_cell(*LANGUAGE, "estimator=none", "task.mini.num_questions=50"))
    assert record.metrics["perplexity"] < 35.4 / 2  # 35.4 by counting pairs of tokens (Witten and Bell)
    assert record.metrics["accuracy"] > 50  # chance is 25
    assert record.weights["source"] == "model.safetensors"


@pytest.mark.system
def test_a_cell_runs_to_its_record_and_is_not_run_again(make_cell):
    overrides = ("estimator=facts", "labels=sampled", "search=cors")
    record = cell_of(make_cell, *overrides)
    assert (record.status, len(record.plan)) == ("done", 28)
    assert record.metrics["mparams"] < 0.85
    assert 14 < record.metrics["perplexity"] < 100
    assert {"accuracy", "accuracy_ending", "accuracy_word", "accuracy_order"} <= record.metrics.keys()
    assert cell_of(make_cell, *overrides).time == record.time


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
