"""A model card says what was measured, and nothing else; and the code that it shows loads the network."""

import re
from dataclasses import replace

import pytest
import torch
import yaml
from torch import nn

import facts
from facts.cost.count import Cost
from facts.saving.save import CARD
from tests.saving.setting import compressed, from_recipe

METRICS = {"top1": {"original": 97.25, "compressed": 95.5}, "seen": {"compressed": 0.0}}


@pytest.fixture(scope="module")
def result():
    return compressed(*from_recipe())


def card_of(result, folder, metrics=None):
    facts.save_compressed(result, folder, metrics)
    _, head, body = (folder / CARD).read_text().split("---\n", 2)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
    return yaml.safe_load(head), body, {name: cells for name, *cells in lines}


def test_costs_metrics_and_origin(result, tmp_path, monkeypatch):
    published = replace(result.model.recipe, tag="vit_tiny_patch16_224.augreg_in21k", weights="pretrained")
    monkeypatch.setattr(result.model, "recipe", published)
    timed = replace(result.summary, latency={"dense": 0.004, "measured": 0.002})
    head, body, rows = card_of(replace(result, summary=timed), tmp_path, METRICS)
    repository = "timm/vit_tiny_patch16_224.augreg_in21k"
    assert head == {"library_name": "facts", "base_model": repository, "tags": ["facts", "compression"]}
    assert f"- licence: the original's, see https://huggingface.co/{repository}" in body
    before, after = result.summary.before, result.summary.after
    assert rows["FLOPs (G)"] == [f"{before.flops / 1e9:.4g}", f"{after.flops / 1e9:.4g}"]
    assert rows["parameters (M)"] == [f"{before.params / 1e6:.4g}", f"{after.params / 1e6:.4g}"]
    assert rows["file (MB)"] == ["", f"{(tmp_path / 'model.safetensors').stat().st_size / 1e6:.4g}"]
    assert [rows[name] for name in ("latency (ms)", "top1", "seen")] == [["4", "2"], ["97.25", "95.5"], ["", "0"]]
    assert f"- method: {result.summary.estimator}, {result.summary.search}, {result.summary.form} layers" in body
    assert f"facts {facts.__version__}, torch " in body and "- budget: 0.5 of the flops of these layers" in body


def test_unknown_values_are_left_out(result, tmp_path):
    unknown = replace(result.summary, before=Cost(None, 10), after=Cost(None, 5))
    head, body, rows = card_of(replace(result, summary=unknown), tmp_path)
    assert "base_model" not in head and "None" not in body and "nan" not in body and "licence" not in body
    assert [name for name in rows if name.strip("-:")] == ["parameters (M)", "file (MB)"]


@pytest.mark.parametrize("has_recipe", [True, False])
def test_the_code_that_loads_it(has_recipe, result, tmp_path, monkeypatch):
    names, inputs = {"dense": nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 20))}, torch.randn(2, 3, 32, 32)
    if not has_recipe:
        result, inputs = facts.compress(names["dense"], estimator="pela", layers=["1"]), torch.randn(2, 12)
    _, body, _ = card_of(result, tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", body, re.DOTALL)[1], names)
    with torch.no_grad():
        assert names["network"](inputs).equal(result.model(inputs))


def test_an_edited_card_is_kept_and_others_are_renewed(result, tmp_path):
    card_of(result, tmp_path)
    assert "97.25" in card_of(result, tmp_path, METRICS)[1]
    mine = (tmp_path / CARD).read_bytes().replace(b"0.5", b"0.6")
    (tmp_path / CARD).write_bytes(mine)
    facts.save_compressed(result, tmp_path)
    assert (tmp_path / CARD).read_bytes() == mine
