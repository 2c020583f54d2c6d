"""The small language model through the experiments: cells, their records, and what is shown of them."""

from tests.language import installed  # noqa: F401, I001

import pytest
import torch

from experiments.runner import open_cell
from experiments.runner import run_cell
from experiments.mini.language import PythonReference
from experiments.mini.train import main, mini_recipe

pytestmark = pytest.mark.system

LANGUAGE = ("model=qwen3_1_7b", "task=language", "ratio=0.7", "cost=params")
FEW = ("task.mini.num_calibration=8", "task.mini.num_sensitivity=4", "task.mini.num_questions=8")


@pytest.fixture
def a_tenth_of_the_text(monkeypatch):
    text = PythonReference.text
    monkeypatch.setattr(PythonReference, "text", lambda task, split: text(task, split)[: len(text(task, split)) // 10])


def run(cell_config, *overrides):
    return run_cell(open_cell(cell_config(*LANGUAGE, *FEW, *overrides)))


def test_the_small_model_predicts_the_text_and_answers_questions(cell_config):
    record = run_cell(open_cell(cell_config(*LANGUAGE, "estimator=none", "task.mini.num_questions=50")))
    assert record.metrics["perplexity"] < 35.4 / 2  # 35.4 by counting pairs of tokens (Witten and Bell)
    assert record.metrics["accuracy"] > 50  # chance is 25
    assert record.weights["source"] == "model.safetensors"


def test_a_cell_runs_to_its_record_and_is_not_run_again(cell_config):
    overrides = ("estimator=facts", "labels=sampled", "search=cors")
    record = run(cell_config, *overrides)
    assert (record.status, len(record.plan)) == ("done", 28)
    assert record.metrics["mparams"] < 0.85
    assert 14 < record.metrics["perplexity"] < 100
    assert {"accuracy", "accuracy_ending", "accuracy_word", "accuracy_order"} <= record.metrics.keys()
    assert run(cell_config, *overrides).time == record.time


@pytest.mark.usefixtures("a_tenth_of_the_text")
def test_finetuning_lowers_the_perplexity(cell_config):
    finetuning = ("finetuning=low_rank", "finetuning.mini.learning_rate=1e-3", "finetuning.mini.num_epochs=1")
    compressed, finetuned = (run(cell_config, "estimator=pela", *more) for more in ([], finetuning))
    assert finetuned.metrics["perplexity"] < compressed.metrics["perplexity"]


@pytest.mark.usefixtures("a_tenth_of_the_text")
def test_analyses_look_at_tokens(cell_config):
    layer = "analysis.mini.layer=model.layers.1.mlp.down_proj"
    few = ("task.mini.num_factors=8", "task.mini.num_held_out=24", "task.mini.analysis_length=10")
    record = run(cell_config, "estimator=none", "analysis=token_coupling", layer, *few)
    coupling = torch.tensor(record.analysis["coupling"])
    assert coupling.shape == (10, 10) and torch.equal(coupling, coupling.T)
    assert coupling[-1].abs().sum() == 0  # nothing is to be predicted at the last place: it has no gradient
    record = run(cell_config, "analysis=throughput", "hardware.batch_size=2", "hardware.timing.num_turns=2", *few)
    assert record.metrics["speedup"] > 0


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
