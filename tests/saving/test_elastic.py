"""A folder for every budget: each cut is the network that a compression with that budget makes, bit by bit."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import facts
from facts.calibration import outputs
from facts.models.weights import sha256
from facts.saving.manifest import DECOMPOSITIONS, ELASTIC
from tests.networks import image_batches, make_causal_lm, same_weights
from tests.refusals import refuses
from tests.saving.edits import edited, of_folder
from tests.saving.setting import UNIT_BATCHES, compressed, compressed_units, from_recipe, mini_mambavision


def with_images(model, shape, num_classes=5):
    return model, image_batches([8] * 5, num_classes=num_classes, shape=shape, dtype=torch.float32)


TEXTS = [*torch.randint(64, (40, 12)).split(8)]
CASES = {
    "units": (lambda: (compressed_units("uniform").original, UNIT_BATCHES), {"parts": "units"}, {}),
    "grouped heads": (lambda: (make_causal_lm(dtype=torch.float32), TEXTS), {"parts": "units"}, {}),
    "plain": (lambda: with_images(*from_recipe()), {}, {"form": "plain", "search": "cors"}),
    "1x1 convolutions": (lambda: with_images(*mini_mambavision(), 10), {"layers": "all"}, {"estimator": "svd_llm"}),
}
COSTS = ("before", "after", "full_flops", "sizes", "bounds", "spent", "budget", "input_shape")


@pytest.mark.system
@pytest.mark.parametrize("case", CASES)
def test_cuts_are_the_compressions(case, tmp_path):
    make, preparation, method = CASES[case]
    prepared = facts.prepare(*make(), **preparation, execution=facts.Execution(cache=tmp_path / "cache"))
    facts.save_elastic(facts.compress(prepared, ratio=0.5, **method), tmp_path / "elastic")
    dense = facts.load_compressed(tmp_path / "elastic")
    assert not any(dense.plan.values()) and dense.summary.after == dense.summary.before
    for budget in ({"flops": 0.9 * prepared.cost.flops}, {"params": 0.85 * prepared.cost.params}, {"ratio": 0.7}):
        found = facts.load_compressed(tmp_path / "elastic", **budget)
        expected = facts.compress(prepared, ratio=budget.pop("ratio", None), budget=facts.Budget(**budget), **method)
        assert found.plan == expected.plan and any(found.plan.values())
        assert same_weights(found.model, expected.model)
        for name in (*COSTS, "form", "widths", "tokens", "predicted"):
            assert getattr(found.summary, name) == getattr(expected.summary, name), name
        assert not found.summary.latency


@pytest.fixture(scope="module")
def saved(units, tmp_path_factory):
    facts.save_elastic(units, folder := tmp_path_factory.mktemp("elastic"))
    return folder


def test_a_latency_is_measured_here(units, saved):
    cut = facts.load_compressed(saved, latency_ms=1e6, params=(params := 0.9 * units.summary.before.params))
    assert any(cut.plan.values()) and cut.summary.after.params <= params
    assert 0 < cut.summary.latency["predicted"] <= 1000
    refuses("cannot be met", facts.load_compressed, saved, latency_ms=1e-6)


def test_a_cut_tells_the_predicted_distance_and_warns_of_a_large_one(saved, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(outputs, "LITTLE", 0)  # the network's outputs hold little information
    folder = shutil.copytree(saved, tmp_path / "copy")
    predicted = facts.load_compressed(folder, ratio=0.5).summary.predicted
    for share, warned in ((0.1, False), (0.3, True)):
        given(information=predicted / share)(folder)
        cut = facts.load_compressed(folder, ratio=0.5)
        assert f"predicted mean distance of the outputs from the original's: {predicted:.4g}" in str(cut)
        assert ("predicted to lose 30% of the original's information" in caplog.text) == warned


def test_a_cut_is_saved_as_any_network(saved, tmp_path):
    cut = facts.load_compressed(saved, ratio=0.6)
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    message = r"dtype must be one of torch\.float64, .*, got torch\.int8"
    refuses(message, facts.save_compressed, cut, tmp_path, dtype=torch.int8)
    assert (tmp_path / ELASTIC).exists()
    facts.save_compressed(cut, tmp_path)
    assert not (tmp_path / ELASTIC).exists() and not (tmp_path / DECOMPOSITIONS).exists()
    again = facts.load_compressed(tmp_path)
    assert again.model(UNIT_BATCHES[0][0]).equal(cut.model(UNIT_BATCHES[0][0])) and again.plan == cut.plan
    message = "was saved for one budget; `facts compress --elastic`"
    refuses(message, facts.load_compressed, tmp_path, ratio=0.5, raised=FileNotFoundError)
    refuses("take search=cors_fisher or cors", facts.save_elastic, compressed(*from_recipe()), tmp_path / "other")
    refuses(r"save_elastic needs a result of facts\.compress", facts.save_elastic, again, tmp_path / "other")


def given(**fields):
    """Change the description: a field's value, or by a function of it."""
    return edited(lambda old: old.update({k: v(old[k]) if callable(v) else v for k, v in fields.items()}), ELASTIC)


@of_folder
def other_tensors(folder, change):
    """Change the decompositions, and their checksum with them."""
    tensors = load_file(folder / DECOMPOSITIONS)
    change(tensors)
    save_file(tensors, folder / DECOMPOSITIONS)
    given(decompositions=sha256(folder / DECOMPOSITIONS))(folder)


FIRST, MLP = "blocks.0.attn.qkv.heads.0", "blocks.0.mlp.fc2"
RIGHT = f"{MLP}/right"
UNFIT = r"elastic\.json does not fit its network: .*"
ATTACKS = {
    "no description": (lambda folder: (folder / ELASTIC).unlink(), "was saved for one budget"),
    "no decompositions": (lambda folder: (folder / DECOMPOSITIONS).unlink(), "is missing"),
    "not JSON": (lambda folder: (folder / ELASTIC).write_text("{"), r"elastic\.json is damaged"),
    "NaN": (given(time_limit=float("nan")), r"elastic\.json is damaged \(time_limit: "),
    "hours of solving": (given(time_limit=1e6), r"elastic\.json is damaged \(time_limit: "),
    "rows too many": (given(rows=lambda rows: dict.fromkeys(rows, 2**60)), r"elastic\.json is damaged \(rows"),
    "a sample that does not fit": (given(input_shape=[1, 3, 5, 5]), UNFIT),
    "bytes": (other_tensors(lambda t: t.update({RIGHT: t[RIGHT].byte()})), UNFIT + "holds torch.uint8"),
    "an infinite mean": (other_tensors(lambda t: t[f"{MLP}/mean"].fill_(torch.inf)), UNFIT + "NaN or infinity"),
    "a sample too large": (given(input_shape=[1, 3, 10**6, 10**6]), UNFIT + "is too large"),
    "other weights": (given(weights="0" * 64), r"elastic\.json belongs to other weights"),
    "other decompositions": (given(decompositions="0" * 64), "different SHA-256"),
    "a layer too few": (given(rows=lambda rows: dict([*rows.items()][1:])), UNFIT),
    "a part that is none": (given(errors={"blocks.0.norm1": [[1, 0.0]]}), UNFIT + r"blocks\.0\.norm1 is no part"),
    "errors of other parts": (given(errors={"head": [[1, 0.0]]}), UNFIT + "'head'"),
    "no errors": (given(errors=lambda errors: {name: [] for name in errors}), UNFIT),
    "a rank too many": (given(errors=lambda errors: {name: [[999, 0.0]] for name in errors}), UNFIT + "these ranks"),
    "another shape": (other_tensors(lambda t: t.update({f"{FIRST}/left": torch.zeros(3, 3)})), UNFIT + "has the shape"),
    "a tensor too few": (other_tensors(lambda t: t.pop(f"{MLP}/order")), UNFIT + "has the shape None"),
    "a tensor too many": (other_tensors(lambda t: t.update(more=torch.zeros(9))), UNFIT + "more has the shape"),
    "no permutation": (other_tensors(lambda t: t[f"{MLP}/order"].zero_()), UNFIT + "not a permutation"),
}


@pytest.mark.attack
@pytest.mark.parametrize("attack", ATTACKS)
def test_damaged_folders_are_refused(attack, saved, tmp_path):
    change, message = ATTACKS[attack]
    folder = shutil.copytree(saved, tmp_path / "copy")
    change(folder)
    refuses(message, facts.load_compressed, folder, ratio=0.5, raised=(ValueError, FileNotFoundError))


@pytest.mark.attack
def test_what_an_interrupted_save_leaves_is_not_cut(units, tmp_path, monkeypatch):
    def interrupted(tensors, path):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("facts.saving.elastic.save_file", interrupted)
        facts.save_elastic(units, tmp_path)
    assert not any(facts.load_compressed(tmp_path).plan.values())
    refuses("was saved for one budget", facts.load_compressed, tmp_path, ratio=0.5, raised=FileNotFoundError)
    facts.save_elastic(units, tmp_path)
    assert any(facts.load_compressed(tmp_path, ratio=0.5).plan.values())
