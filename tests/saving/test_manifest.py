"""The manifest says where a network comes from and how good it is."""

import json
import shutil
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_file

import facts
from experiments.mini.train import mini_recipe
from facts.models.weights import sha256
from facts.saving.manifest import MANIFEST, WEIGHTS, Manifest
from tests.saving.setting import compressed


def test_origin_of_a_recipe(tmp_path):
    recipe = mini_recipe("deit_b")
    result = compressed(recipe.build(), (1, 16, 16))
    facts.save_compressed(result, tmp_path)
    base_model = json.loads((tmp_path / MANIFEST).read_text())["base_model"]
    assert base_model == {
        "name": recipe.tag,
        "source": "mini_deit.safetensors",
        "sha256": sha256(recipe.checkpoint()),
    }
    facts.save_compressed(facts.load_compressed(tmp_path), tmp_path / "again")
    assert json.loads((tmp_path / "again" / MANIFEST).read_text())["base_model"] == base_model


def test_origin_of_weights_that_are_gone(tmp_path):
    recipe = mini_recipe("deit_b")
    shutil.copy(recipe.checkpoint(), tmp_path / "mine.safetensors")
    model = replace(recipe, weights=str(tmp_path / "mine.safetensors")).build()
    (tmp_path / "mine.safetensors").unlink()
    facts.save_compressed(compressed(model, (1, 16, 16)), tmp_path / "saved")
    description = (tmp_path / "saved" / MANIFEST).read_text()
    assert json.loads(description)["base_model"] == {"name": recipe.tag, "source": "mine.safetensors"}
    assert str(tmp_path) not in description  # where it lay is nobody's business


@pytest.mark.parametrize("read", [True, False])
def test_origin_of_a_network_of_timm(tmp_path, monkeypatch, read):
    """timm does not say whether weights are the published ones; the file does, where this machine has it."""
    model = timm.create_model("test_vit", num_classes=7).eval()
    published = tmp_path / "model.safetensors"
    save_file((model if read else timm.create_model("test_vit")).state_dict(), published)
    monkeypatch.setattr("facts.saving.provenance.fetched", lambda repository: published)
    facts.save_compressed(compressed(model, (3, 160, 160)), tmp_path / "saved")
    base_model = json.loads((tmp_path / "saved" / MANIFEST).read_text())["base_model"]
    assert base_model["name"] == ("test_vit.r160_in1k" if read else "test_vit")
    assert base_model.get("repository") == ("timm/test_vit.r160_in1k" if read else None)
    assert base_model.get("sha256") == (sha256(published) if read else None)


def test_versions_and_fingerprint(saved):
    description = json.loads((saved[1] / MANIFEST).read_text())
    assert description["versions"] == {
        "facts": facts.__version__,
        "torch": torch.__version__.partition("+")[0],
        "timm": timm.__version__,
    }
    assert description["fingerprint"] == sha256(saved[1] / WEIGHTS)


def test_metrics(saved):
    result, folder = saved
    metrics = {"top1": {"original": 72.1, "compressed": 70.3}, "loss": {"compressed": 1}}
    facts.save_compressed(result, folder, metrics)
    assert json.loads((folder / MANIFEST).read_text())["metrics"] == metrics


@pytest.mark.parametrize("metrics", [{"top1": 70.3}, {"top1": {"after": 70.3}}, {"top1": {"original": "high"}}, 3])
def test_metrics_of_another_shape(saved, tmp_path, metrics):
    with pytest.raises(ValueError, match=r'metrics must be numbers by name, such as \{"top1": \{"original": 72\.1'):
        facts.save_compressed(saved[0], tmp_path / "new", metrics)
    assert not (tmp_path / "new").exists()


def test_a_folder_in_its_place(tmp_path):
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(ValueError, match="is no file with content: remove it"):
        Manifest.read(tmp_path)
