"""A network of narrower units is an ordinary one: saved, loaded, exported, compiled, trained, recovered."""

import copy
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import facts
from facts.modules.heads import PaddedHeads
from facts.saving.export import openvino_call
from facts.saving.manifest import LOADER, MANIFEST
from facts.saving.save import CARD
from tests.networks import compiled_outputs, image_batches
from tests.saving.edits import put
from tests.saving.setting import UNIT_BATCHES, assert_same, compressed, from_recipe
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
    assert (plan[SCORES] != plan[OUTPUTS]) == ("CoRS" in units.summary.search)
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
@pytest.mark.skipif(find_spec("openvino") is None, reason="the extra `openvino` is not installed")
def test_openvino(units, tmp_path):
    facts.export_openvino(units, IMAGES[:1], tmp_path / "model.xml")
    outputs, expected = openvino_call(tmp_path / "model.xml")(IMAGES), outputs_of(units.model)
    assert (outputs - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.system
def test_compiles_without_a_graph_break(units):
    outputs = compiled_outputs(units.model, IMAGES, "aot_eager")
    torch.testing.assert_close(outputs, outputs_of(units.model))


def test_recovered(units):
    data = image_batches([64] * 8, num_classes=10, shape=SHAPE, dtype=torch.float32, seed=2)
    recovered = facts.recover(units, data, epochs=8, learning_rate=1e-3, num_warmups=0, batch_size=16, views=False)
    assert recovered.summary.recovery.after < 0.8 * recovered.summary.recovery.before
    assert recovered.plan == units.plan and recovered.summary.after == units.summary.after
    assert [each.shape for each in recovered.model.parameters()] == [each.shape for each in units.model.parameters()]


def test_the_card_and_the_summary_speak_of_units(units, tmp_path):
    facts.save_compressed(units, tmp_path)
    card, printed = (tmp_path / CARD).read_text(), repr(units)
    assert ", units\n" in card and "- budget: 0.5 of the flops of these units" in card and "layers" not in card
    assert f"Without facts: `{LOADER}`" in card
    assert "the compressed units keep" in printed and "pivoted" not in printed
    assert printed.startswith(f"VisionTransformer: {sum(map(bool, units.plan.values()))} units narrower (ranks ")


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


def test_the_text_lies_beside_units_alone(units, tmp_path):
    facts.save_compressed(units, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {CARD, LOADER, MANIFEST, "model.safetensors"}
    facts.save_compressed(compressed(*from_recipe()), tmp_path)
    assert not (tmp_path / LOADER).exists() and LOADER not in (tmp_path / CARD).read_text()
