"""A network of narrower units is an ordinary one: saved, loaded, exported, compiled, trained, recovered."""

import copy
import subprocess
import sys

import pytest
import torch

import facts
from facts.modules.heads import PaddedHeads
from facts.saving.manifest import LOADER
from tests.saving.edits import put
from tests.saving.setting import UNIT_BATCHES, assert_same, compressed_units
from tests.saving.test_export import EXPORTS
from tests.saving.test_export import assert_same as assert_exported

SHAPE, IMAGES = (3, 32, 32), UNIT_BATCHES[0][0]
SCORES, OUTPUTS, HIDDEN = "blocks.0.attn.scores", "blocks.0.attn.outputs", "blocks.0.mlp"
WITHOUT_FACTS = f"""
import sys, pathlib, timm, torch
sys.modules["facts"] = None  # importing it raises an error
names, (source, half, images, outputs) = {{}}, sys.argv[1:]
exec(pathlib.Path(source, "{LOADER}").read_text(), names)
images = torch.load(images)
with torch.no_grad():
    found = [names["load"](source)(images), names["load"](half)(images.bfloat16())]
    timm.layers.set_fused_attn(False)  # by timm's own scale of the scores
    torch.save([*found, names["load"](source)(images)], outputs)
"""


def outputs_of(model, images=IMAGES):
    with torch.no_grad():
        return model(images)


def test_saved_and_loaded(units, tmp_path):
    plan, block = units.plan, units.model.blocks[0]
    assert block.mlp.fc1.out_features == plan[HIDDEN] < 192 and plan[SCORES] < 16
    assert (plan[SCORES] != plan[OUTPUTS]) == ("CoRS" in units.summary.method.search)
    assert isinstance(block.attn.qkv, PaddedHeads) == (plan[SCORES] != plan[OUTPUTS])
    facts.save_compressed(units, tmp_path)
    loaded = facts.load_compressed(tmp_path)
    assert_same(loaded, units, SHAPE)
    assert repr(loaded.model) == repr(units.model)
    facts.save_compressed(loaded, tmp_path / "again")
    assert_same(facts.load_compressed(tmp_path / "again", model=copy.deepcopy(units.original)), units, SHAPE)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "rank", "fault"),
    [
        (SCORES, 17, "'blocks.0.attn.scores' has ranks up to 16, not 17"),
        (OUTPUTS, 17, "'blocks.0.attn.outputs' has ranks up to 16, not 17"),
        (HIDDEN, 193, "'blocks.0.mlp' has ranks up to 192, not 193"),
        ("blocks.2.attn.scores", 1, "'blocks.2.attn.scores' is missing"),
        ("blocks.0.mlp.scores", 1, "'blocks.0.mlp.scores' is missing"),
        ("blocks.0.attn", 1, "'blocks.0.attn' is missing, or no part to compress"),
        (HIDDEN, 3, "tensors differ"),
    ],
)
def test_another_plan_is_refused_before_anything_is_built(units, name, rank, fault, tmp_path, monkeypatch):
    facts.save_compressed(units, tmp_path)
    put(rank, "plan", name)(tmp_path)
    monkeypatch.setattr("facts.saving.load.sha256", lambda _: pytest.fail("it would be built next"))
    with pytest.raises(ValueError, match=fault):
        facts.load_compressed(tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("kind", EXPORTS)
def test_exports(units, kind, tmp_path):
    file = tmp_path / f"model.{kind}"
    EXPORTS[kind][0](units, IMAGES[:2], file)
    assert_exported(file, units.model, SHAPE)


@pytest.mark.system
def test_the_text_in_the_folder_loads_it_without_facts(units, tmp_path):
    facts.save_compressed(units, tmp_path / "saved")
    facts.save_compressed(units, tmp_path / "half", dtype=torch.bfloat16)
    torch.save(IMAGES, tmp_path / "images")
    paths = [tmp_path / name for name in ("saved", "half", "images", "outputs")]
    subprocess.run([sys.executable, "-I", "-c", WITHOUT_FACTS, *paths], check=True, cwd=tmp_path)
    outputs, in_half, not_fused = torch.load(paths[-1])
    torch.testing.assert_close(not_fused, outputs)
    assert outputs.equal(outputs_of(units.model))
    assert in_half.equal(outputs_of(facts.load_compressed(tmp_path / "half").model, IMAGES.bfloat16()))


@pytest.mark.system
def test_tokens_are_merged_without_facts_too(tmp_path):
    result = compressed_units("cors_fisher", "units,tokens")
    assert any(count for name, count in result.plan.items() if name.endswith("tokens"))
    paths = [tmp_path, tmp_path, tmp_path / "images.pt", tmp_path / "outputs.pt"]
    facts.save_compressed(result, tmp_path)
    torch.save(IMAGES, paths[2])
    subprocess.run([sys.executable, "-I", "-c", WITHOUT_FACTS.replace(".bfloat16()", ""), *paths], check=True)
    for outputs in torch.load(paths[-1]):
        torch.testing.assert_close(outputs, outputs_of(result.model), rtol=1e-4, atol=1e-5)
