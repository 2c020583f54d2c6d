"""The commands on a language model in a folder and texts in files."""

import json
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `llm` is not installed: make install-llm")
pytest.importorskip("tokenizers", reason="the extra `llm` is not installed: make install-llm")

from experiments.mini.language import new_tokenizer
from facts.cli.inputs import build
from tests.networks import make_causal_lm

NUM_TOKENS = 280  # 256 of them bytes
SIZES = ("--sequence-length", 16, "--num-calibration", 4, "--batch-size", 2)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """One to calibrate on, and another to evaluate on."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text(" ".join(f"the number {index} comes first;" for index in range(80)))
    (folder / "test.txt").write_text(" ".join(f"then {index} is the next number," for index in range(40)))
    return folder


@pytest.fixture(scope="module")
def language_model(texts, tmp_path_factory):
    """As transformers saves one."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = make_causal_lm(dtype=torch.float32)
    model.resize_token_embeddings(NUM_TOKENS)
    model.save_pretrained(folder)
    new_tokenizer((texts / "train.txt").read_text(), NUM_TOKENS).save_pretrained(folder)
    return folder


def test_compress_and_evaluate(run, language_model, texts, tmp_path):
    data = ("--data", texts / "train.txt", "--evaluation-text", texts / "test.txt")
    result = run("compress", language_model, *data, *SIZES, "--out", tmp_path / "small")
    assert "perplexity" in result.output
    metrics = json.loads((tmp_path / "small" / "compression.json").read_text())["metrics"]
    sizes = ("--sequence-length", 16, "--batch-size", 2, "--json")
    for network, which in ((tmp_path / "small", "compressed"), (language_model, "original")):
        figures = json.loads(run("evaluate", network, "--data", texts / "test.txt", *sizes).stdout)
        for name in ("perplexity", "perplexity_standard_error"):
            assert figures[name] == pytest.approx(metrics[name][which], rel=1e-5)
        assert f"{figures['num_samples']} samples " in result.output
    assert "--unseen is for images" in run("evaluate", language_model, *data[:2], "--unseen", code=1).output


def test_texts_that_are_missing_or_short(run, language_model, texts, tmp_path):
    (tmp_path / "short.txt").write_text("one two three four five six")
    tokenizer = build(str(language_model), None, None, "cpu").tokenizer
    one_window = ("--sequence-length", len(tokenizer("one two three four five six")["input_ids"]))
    for text, options, message in (
        ("nowhere.txt", (), "nowhere.txt: give a file or hub:OWNER/DATASET/CONFIGURATION/SPLIT"),
        (texts / "test.txt", ("--num-calibration", 1000), "fewer than 1,000 to calibrate on and 16 more for searches"),
        (texts / "test.txt", ("--sequence-length", 5000), "not one window of 5,000: give a longer text, or a smaller"),
        (tmp_path / "short.txt", one_window, "has 1 windows of"),
    ):
        arguments = ("compress", language_model, "--data", text, *SIZES, *options, "--out", tmp_path / "small")
        assert message in run(*arguments, code=1).output


def test_networks_that_are_not_whole(run, language_model, texts, tmp_path, monkeypatch):
    data = ("--data", texts / "test.txt")
    (tmp_path / "config.json").write_text("{")
    assert "config.json is damaged" in run("evaluate", tmp_path, *data, code=1).output
    (tmp_path / "config.json").write_bytes((language_model / "config.json").read_bytes())
    result = run("evaluate", tmp_path, *data, code=1)
    assert "no checkpoint" in result.output and "model.safetensors" in result.output
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install -e '.[llm]'" in run("evaluate", language_model, *data, code=1).output
