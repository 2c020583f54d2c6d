"""A model card says what was measured, and nothing else; and what it says of loading works."""

import re
from dataclasses import replace

import pytest
import torch
import yaml
from torch import nn

import facts
from experiments.mini.train import mini_recipe
from facts.cost.count import Cost
from facts.saving.model_card import CARD

METRICS = {"top1": {"original": 97.25, "compressed": 95.5}, "seen": {"compressed": 3.0}, "before": {"original": 0.5}}


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    return facts.compress(facts.prepare(mini_recipe("deit_b").build(), input_shape=(1, 16, 16)), estimator="pela")


def card_of(result, folder, metrics=None):
    facts.save_compressed(result, folder, metrics)
    text = (folder / CARD).read_text()
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def rows(body):
    """The first table, by the names in its first column."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
    return {name: cells for name, *cells in lines[: next(i for i, line in enumerate(lines) if line[0] == "layer")]}


def test_what_the_hub_reads(result, tmp_path):
    head, _ = card_of(result, tmp_path / "small", METRICS)
    assert (head["library_name"], head["pipeline_tag"]) == ("facts", "image-classification")
    assert "base_model" not in head  # its weights are published nowhere
    (index,) = head["model-index"]
    assert index["name"] == "small"
    measured = [metric for entry in index["results"] for metric in entry["metrics"]]
    assert {metric["type"]: metric["value"] for metric in measured} == {"top1": 95.5, "seen": 3.0}


def test_the_repository_of_the_original(result, tmp_path, monkeypatch):
    """As of weights that were fetched."""
    published = replace(mini_recipe("deit_b"), tag="deit_tiny_distilled_patch16_224.fb_in1k", weights="pretrained")
    monkeypatch.setattr(result.model, "recipe", published)
    monkeypatch.setattr("facts.models.builders.fetched", lambda repository: mini_recipe("deit_b").checkpoint())
    head, body = card_of(result, tmp_path)
    assert head["base_model"] == "timm/deit_tiny_distilled_patch16_224.fb_in1k"
    assert "licence: that of the original: see timm/deit_tiny_distilled_patch16_224.fb_in1k" in body


def test_the_measured_table(result, tmp_path):
    latency = {"dense": 0.004, "allowed": 0.003, "predicted": 0.0021, "measured": 0.002}
    timed = replace(result, summary=replace(result.summary, latency=latency))
    _, body = card_of(timed, tmp_path, METRICS)
    before, after = result.summary.before, result.summary.after
    table = rows(body)
    assert table["FLOPs (G)"] == [
        f"{before.flops / 1e9:.4g}", f"{after.flops / 1e9:.4g}", f"{after.flops / before.flops:.1%}"
    ]  # fmt: skip
    assert table["parameters (M)"][0] == f"{before.params / 1e6:.4g}"
    assert table["file (MB)"] == ["", f"{(tmp_path / 'model.safetensors').stat().st_size / 1e6:.4g}", ""]
    assert table["latency (ms)"] == ["4", "2", "50.0%"]
    assert table["top1"] == ["97.25", "95.5", ""]
    assert table["seen"] == ["", "3", ""]
    assert table["before"] == ["0.5", "", ""]


def test_what_was_not_measured_is_left_out(result, tmp_path):
    unknown = replace(result.summary, before=Cost(None, 10), after=Cost(None, 5))
    head, body = card_of(replace(result, summary=unknown), tmp_path)
    assert "model-index" not in head
    assert [name for name in rows(body) if name.strip("-")] == ["parameters (M)", "file (MB)"]
    assert "None" not in body and "nan" not in body


def test_how_it_was_made(result, tmp_path):
    _, body = card_of(result, tmp_path)
    assert f"- estimator: `{result.summary.estimator}`" in body
    assert "- budget: 0.5 of the flops of the compressed layers" in body
    assert f"facts {facts.__version__}, torch " in body
    assert "`mini_deit.safetensors`, SHA-256 " in body
    for name, rank in result.plan.items():
        assert re.search(rf"\| `{name}` +\| +{'dense' if rank is None else rank} +\|", body)


def test_the_code_that_loads_it(result, tmp_path, monkeypatch):
    _, body = card_of(result, tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(re.search(r"```python\n(.*?)```", body, re.DOTALL)[1], names)
    images = torch.randn(2, 1, 16, 16)
    with torch.no_grad():
        assert names["network"](images).equal(result.model(images))


def test_a_network_without_a_recipe(tmp_path, monkeypatch):
    result = facts.compress(
        nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20)), estimator="pela", layers=["2"]
    )
    head, body = card_of(result, tmp_path / "small")
    assert not {"pipeline_tag", "base_model"} & head.keys()
    monkeypatch.chdir(tmp_path)
    names = {"dense": nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20))}
    exec(re.search(r"```python\n(.*?)```", body, re.DOTALL)[1], names)
    inputs = torch.randn(3, 12)
    with torch.no_grad():
        assert names["network"](inputs).equal(result.model(inputs))


@pytest.mark.parametrize(
    "change", [lambda card: card + b"More.", lambda card: card.replace(b"0.5", b"0.6"), lambda _: b"\xff"]
)
def test_a_changed_card_stays(result, tmp_path, change):
    card_of(result, tmp_path)
    mine = change((tmp_path / CARD).read_bytes())
    (tmp_path / CARD).write_bytes(mine)
    facts.save_compressed(result, tmp_path, METRICS)
    assert (tmp_path / CARD).read_bytes() == mine


def test_an_unchanged_card_is_renewed(result, tmp_path):
    card_of(result, tmp_path)
    _, body = card_of(result, tmp_path, METRICS)
    assert "97.25" in body
