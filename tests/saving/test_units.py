"""A network of narrower units is an ordinary one: saved, loaded, exported, compiled, trained, recovered."""

import copy

import pytest

import facts
from facts.modules.heads import PaddedHeads
from tests.saving.edits import put
from tests.saving.setting import UNIT_BATCHES, assert_same
from tests.saving.test_export import EXPORTS
from tests.saving.test_export import assert_same as assert_exported

SHAPE, IMAGES = (3, 32, 32), UNIT_BATCHES[0][0]
SCORES, OUTPUTS, HIDDEN = "blocks.0.attn.scores", "blocks.0.attn.outputs", "blocks.0.mlp"


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
