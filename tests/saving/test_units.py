"""A network of narrower units is an ordinary one: saved, loaded, exported, compiled, trained, recovered."""

import copy
import subprocess
import sys

import pytest
import torch

import facts
from facts.modules.heads import PaddedHeads
from facts.saving.manifest import LOADER
from tests.saving.setting import UNIT_BATCHES, assert_same, compressed_units
from tests.saving.test_export import EXPORTS
from tests.saving.test_export import assert_same as assert_exported

SHAPE, IMAGES = (3, 32, 32), UNIT_BATCHES[0][0]
SCORES, OUTPUTS, HIDDEN = "blocks.0.attn.scores", "blocks.0.attn.outputs", "blocks.0.mlp"
WITHOUT_FACTS = f"""
import sys, pathlib, timm, torch
sys.modules["facts"] = None  # importing it raises an error
*folders, images, outputs = sys.argv[1:]
images = torch.load(images)
def run(folder):
    exec(pathlib.Path(folder, "{LOADER}").read_text(), names := {{}})
    network = names["load"](folder)
    return network(images.to(next(network.parameters()).dtype))
with torch.no_grad():
    found = [*map(run, folders)]
    timm.layers.set_fused_attn(False)  # by timm's own scale of the scores
    torch.save([found, [*map(run, folders)]], outputs)
"""


def test_saved_and_loaded(units, tmp_path):
    plan, block = units.plan, units.model.blocks[0]
    assert block.mlp.fc1.out_features == plan[HIDDEN] < 192 and plan[SCORES] < 16
    assert (plan[SCORES] != plan[OUTPUTS]) == ("CoRS" in units.summary.search)
    assert isinstance(block.attn.qkv, PaddedHeads) == (plan[SCORES] != plan[OUTPUTS])
    facts.save_compressed(units, tmp_path)
    loaded = facts.load_compressed(tmp_path)
    assert_same(loaded, units, SHAPE)
    assert repr(loaded.model) == repr(units.model)
    facts.save_compressed(loaded, tmp_path / "again")
    assert_same(facts.load_compressed(tmp_path / "again", model=copy.deepcopy(units.original)), units, SHAPE)


@pytest.mark.system
@pytest.mark.parametrize("kind", EXPORTS)
def test_exports(units, kind, tmp_path):
    file = tmp_path / f"model.{kind}"
    EXPORTS[kind][0](units, IMAGES[:2], file)
    assert_exported(file, units.model, SHAPE)


@pytest.mark.system
def test_the_text_in_the_folder_loads_it_without_facts(units, tmp_path):
    """Merged tokens too; a network in half precision is computed in it."""
    merged = compressed_units("cors_fisher", "units,tokens")
    assert any(count for name, count in merged.plan.items() if name.endswith("tokens"))
    results = {"units": (units, {}), "half": (units, {"dtype": torch.bfloat16}), "merged": (merged, {})}
    for name, (result, options) in results.items():
        facts.save_compressed(result, tmp_path / name, **options)
    torch.save(IMAGES, tmp_path / "images")
    paths = [tmp_path / name for name in (*results, "images", "outputs")]
    subprocess.run([sys.executable, "-I", "-c", WITHOUT_FACTS, *paths], check=True, cwd=tmp_path)
    (outputs, in_half, of_merged), not_fused = torch.load(paths[-1])
    assert outputs.equal(units.model(IMAGES))
    assert in_half.equal(facts.load_compressed(tmp_path / "half").model(IMAGES.bfloat16()))
    torch.testing.assert_close(not_fused[0], outputs)
    for found in (of_merged, not_fused[-1]):
        torch.testing.assert_close(found, merged.model(IMAGES), rtol=1e-4, atol=1e-5)
