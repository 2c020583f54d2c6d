"""Texts, windows, perplexities and benchmarks."""

from tests.language import installed  # noqa: F401, I001

import math
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from facts.utils import hub
from facts.moments.losses import NOTHING
from facts.models import CausalLM
from facts.models.causal_lm import new_tokenizer
from facts.modules.networks import run
from facts.tasks.language.benchmarks import accuracies, find_benchmarks
from facts.tasks.language.corpus import Corpus
from facts.tasks.language.base import perplexity, windows
from facts.tasks.language.ngrams import bigram_perplexity, unigram_perplexity
from facts.tasks.language.python_reference import PythonReference, paragraphs
from facts.tasks.language.questions import CHOICES, KINDS, questions
from tests.language.architectures import build

NUM_TOKENS = 300


@pytest.fixture(scope="module")
def task():
    return PythonReference(num_calibration=20, num_sensitivity=4, batch_size=8, num_questions=12, num_factors=16)


@pytest.fixture(scope="module")
def model(task):
    network = build("llama", vocab_size=NUM_TOKENS)
    network.tokenizer = new_tokenizer(task.text("training"), NUM_TOKENS)
    return network


def test_no_paragraph_is_in_both_splits(task):
    training, evaluation = (
        {" ".join(text.split()) for text in paragraphs(split)} for split in ("training", "evaluation")
    )
    assert not training & evaluation
    assert len(training) + len(evaluation) == len(paragraphs("training")) + len(paragraphs("evaluation"))
    assert 4 < len(task.text("training")) / len(task.text("evaluation")) < 6


def test_windows_leave_out_the_rest_alone():
    assert windows(torch.arange(7), 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="2 tokens has not one window of 3"):
        windows(torch.arange(2), 3)


def test_calibration_and_sensitivity_share_no_window(task, model):
    calibration, sensitivity = (
        {tuple(row.tolist()) for tokens, _ in batches for row in tokens}
        for batches in (task.calibration(model), task.sensitivity(model))
    )
    assert (len(calibration), len(sensitivity)) == (20, 4) and not calibration & sensitivity
    tokens, targets = task.calibration(model)[0]
    assert tokens.shape == (8, 128)
    assert torch.equal(targets[:, :-1], tokens[:, 1:]) and (targets[:, -1] == NOTHING).all()


def test_a_text_with_too_few_windows_says_how_many_it_has(task, model):
    with pytest.raises(ValueError, match="needs 100004 windows of 128 tokens; the training text has"):
        replace(task, num_calibration=100_000).calibration(model)
    with pytest.raises(ValueError, match="needs 100016 windows of 128 tokens; the evaluation text has"):
        replace(task, num_held_out=100_000).analysis(model)


def test_training_shows_every_window_once_an_epoch_and_others_in_the_next(task, model):
    first, again, other = (task.training(model, epoch) for epoch in (0, 0, 1))
    assert all(torch.equal(one[0], two[0]) for one, two in zip(first, again, strict=True))
    rows = {tuple(row.tolist()) for tokens, _ in first for row in tokens}
    assert len(rows) == 8 * len(first)
    assert not rows & {tuple(row.tolist()) for tokens, _ in other for row in tokens}


@pytest.mark.parametrize("rest", [0, 1, 60, 127])
def test_every_epoch_has_as_many_batches(tmp_path, model, rest):
    """Though a text cut elsewhere may have one window less."""
    (tmp_path / "text").write_text("words and words and other words " * 100)
    length = (len(model.tokenizer((tmp_path / "text").read_text())["input_ids"]) - rest) // 3
    corpus = Corpus(training_text=str(tmp_path / "text"), evaluation_text="", sequence_length=length)
    epochs = [corpus.training(model, epoch, seed=5) for epoch in range(12)]
    assert {len(batches) for batches in epochs} == ({2} if rest < length - 1 else {3})
    whole = replace(corpus, sequence_length=length * 3 + rest).training(model, 0)
    assert len(whole) == 1


def test_perplexity_is_that_of_transformers_own_loss(task, model):
    batches = task.evaluation(model)[:3]
    with torch.no_grad():
        losses = [model(tokens, labels=tokens).loss.item() for tokens, _ in batches]
    assert perplexity(model, batches) == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)


def test_ngrams_against_counting_by_hand():
    training, text = torch.tensor([0, 1, 2, 0, 1, 1, 0, 2]), [torch.tensor([[0, 1, 3], [2, 0, 1]])]
    single = {token: (Counter(training.tolist())[token] + 1) / 12 for token in range(4)}
    expected = math.exp(-sum(math.log(single[token]) for token in (1, 3, 0, 1)) / 4)
    assert unigram_perplexity(training, text, 4) == pytest.approx(expected)

    # Successors: 0 -> 1, 1, 2; 1 -> 2, 1, 0; 2 -> 0
    pairs = [
        (2 + 2 * single[1]) / (3 + 2),
        (0 + 3 * single[3]) / (3 + 3),
        (1 + 1 * single[0]) / (1 + 1),
        (2 + 2 * single[1]) / (3 + 2),
    ]
    expected = math.exp(-sum(map(math.log, pairs)) / 4)
    assert bigram_perplexity(training, text, 4) == pytest.approx(expected)


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


@pytest.mark.parametrize("accuracy", ["acc", "acc_norm"])
def test_accuracy_is_that_of_the_likeliest_choice(task, model, accuracy):
    found = replace(task, accuracy=accuracy).evaluate(model)
    assert found["accuracy"] == pytest.approx(sum(found[f"accuracy_{kind}"] for kind in KINDS) / len(KINDS))
    for kind in KINDS:
        made = questions(kind, paragraphs("evaluation"), 12, task.seed)
        right = [_likeliest(model, question, accuracy == "acc_norm") == question["answer"] for question in made]
        assert found[f"accuracy_{kind}"] == pytest.approx(100 * sum(right) / 12)


def _likeliest(model, question, by_length):
    context = model.tokenizer(question["context"])["input_ids"]
    likelihoods = []
    for choice in question["choices"]:
        tokens = model.tokenizer(f"{question['context']} {choice}")["input_ids"]
        with torch.no_grad():
            log_probabilities = run(model, torch.tensor([tokens])).log_softmax(-1)[0]
        likelihood = sum(log_probabilities[i - 1, tokens[i]].item() for i in range(len(context), len(tokens)))
        likelihoods.append(likelihood / (len(choice) if by_length else 1))
    return max(range(CHOICES), key=likelihoods.__getitem__)


def test_evaluation_leaves_the_tokenizer_as_it_is(task, model):
    model.tokenizer.pad_token = None
    task.evaluate(model)
    assert model.tokenizer.pad_token is None


def test_evaluation_draws_nothing_that_others_draw(task, model):
    torch.manual_seed(3)
    task.evaluate(model)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


def test_the_key_knows_text_windows_and_questions(task, model):
    keys = {replace(task, **change).content_key(model) for change in ({}, {"seed": 1}, {"num_questions": 13})}
    assert len(keys) == 3
    other = build("llama", vocab_size=NUM_TOKENS)
    other.tokenizer = new_tokenizer(task.text("evaluation"), NUM_TOKENS)
    assert task.content_key(other) not in keys


def test_a_network_without_tokenizer_is_told_what_it_needs(task):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no tokenizer: set model\.tokenizer"):
        task.calibration(build("llama"))


def test_texts_in_files(tmp_path, model):
    for split in ("training", "evaluation"):
        (tmp_path / split).write_text(f"the {split} of a text " * 200, encoding="utf-8")
    files = {f"{split}_text": str(tmp_path / split) for split in ("training", "evaluation")}
    corpus = Corpus(**files, sequence_length=16, num_calibration=4, num_sensitivity=2)
    assert corpus.inspect().count("bytes") == 2
    found = corpus.evaluate(model)
    assert found.keys() == {"perplexity", "unigram_perplexity", "bigram_perplexity"}
    with pytest.raises(FileNotFoundError, match=r"no text .*nowhere"):
        replace(corpus, training_text=str(tmp_path / "nowhere")).inspect()


@pytest.fixture
def no_hub(monkeypatch):
    """A machine on which the hub does not answer."""
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there


def test_the_key_knows_the_files_that_describe_benchmarks(tmp_path, written):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.yaml").write_text("task: others")
    corpus = Corpus(training_text="", evaluation_text="", benchmark_names=("mine",), benchmark_folder=written)
    before = corpus.benchmarks_key
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "records.pyc").write_bytes(b"compiled")
    assert corpus.benchmarks_key == before
    (tmp_path / "more" / "mine.yaml").write_text("task: yet_others")
    assert corpus.benchmarks_key != before


def test_what_cannot_be_asked_is_noticed_before_any_work(no_hub, tmp_path, written):
    (tmp_path / "text").write_text("a text")
    files = {"training_text": str(tmp_path / "text"), "evaluation_text": str(tmp_path / "text")}
    corpus = Corpus(**files, benchmark_names=("mine",), benchmark_folder=written)
    assert corpus.inspect().endswith("1 benchmarks")
    with pytest.raises(ValueError, match="no benchmark is called yours"):
        replace(corpus, benchmark_names=("yours",)).inspect()


@pytest.mark.system
def test_benchmarks_of_the_hub_are_looked_for_there_before_any_work(no_hub, tmp_path):
    (tmp_path / "text").write_text("a text")
    files = {"training_text": str(tmp_path / "text"), "evaluation_text": str(tmp_path / "text")}
    with pytest.raises(ConnectionError, match="or benchmark_names"):
        Corpus(**files, benchmark_names=("piqa",)).inspect()


def test_without_the_hub_a_text_is_an_error_at_once(no_hub, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    source = "hub:nobody/nothing/plain/test"
    corpus = Corpus(training_text=source, evaluation_text=source)
    start = time.perf_counter()
    for look in (corpus.inspect, lambda: corpus.text("evaluation")):
        with pytest.raises(ConnectionError, match=r"Connect the machine .* or give the text as a file"):
            look()
    with pytest.raises(FileNotFoundError, match="configuration of nobody/nothing is neither"):
        CausalLM(tag="nobody/nothing", weights="random").build()
    with pytest.raises(ValueError, match="hub:OWNER/DATASET/CONFIGURATION/SPLIT, got 'hub:wikitext'"):
        replace(corpus, evaluation_text="hub:wikitext").text("evaluation")
    assert time.perf_counter() - start < 20  # rather than minutes of attempts


@pytest.fixture
def written(tmp_path):
    """A folder with a benchmark that is of no multiple choice."""
    (tmp_path / "questions.jsonl").write_text('{"a": "x y", "b": "z"}\n')
    source = f"{{data_files: {{test: {tmp_path}/questions.jsonl}}, cache_dir: {tmp_path}}}"
    (tmp_path / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {source}\ntest_split: test\noutput_type: loglikelihood\n"
        "doc_to_text: '{{a}}'\ndoc_to_target: '{{b}}'\nmetric_list: [{metric: perplexity}]\n"
    )
    return str(tmp_path)


def test_unknown_benchmarks_and_those_without_an_accuracy_are_named(model, written):
    with pytest.raises(ValueError, match=r"no benchmark is called yours in .*, which describes mine"):
        accuracies(model, model.tokenizer, ["mine", "yours"], 4, folder=written)
    with pytest.raises(ValueError, match="gives no accuracy of mine"):
        accuracies(model, model.tokenizer, ["mine"], 4, folder=written)


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ImportError, match=r"benchmarks need lm-eval .*: pip install -e '.\[llm\]'"):
        find_benchmarks(["piqa"])
