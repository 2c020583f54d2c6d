"""Damage to a saved folder is told plainly."""

import pytest

import facts
from facts.models import TimmModel
from facts.models.weights import sha256
from facts.modules.lowrank import LowRankLinear
from facts.saving.manifest import MANIFEST, WEIGHTS
from tests.saving.setting import TIMM, assert_same, compressed, edit, from_recipe

pytestmark = pytest.mark.attack


def truncate(path, keep):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])


@pytest.mark.parametrize("keep", [0, 0.3, 0.99])
def test_truncated_weights(saved, keep):
    _, folder = saved
    truncate(folder / WEIGHTS, keep)
    with pytest.raises(ValueError, match=r"model\.safetensors is not the file that compression\.json describes"):
        facts.load_compressed(folder)


@pytest.mark.parametrize("keep", [0, 0.3, 0.99])
def test_truncated_weights_whose_fingerprint_fits(saved, keep):
    _, folder = saved
    truncate(folder / WEIGHTS, keep)
    edit(folder, lambda description: description.update(fingerprint=sha256(folder / WEIGHTS)))
    with pytest.raises(ValueError, match=r"model\.safetensors is no whole safetensors file .*; save or fetch it"):
        facts.load_compressed(folder)


@pytest.mark.parametrize("keep", [0, 0.3, 0.99])
def test_truncated_description(saved, keep):
    _, folder = saved
    truncate(folder / MANIFEST, keep)
    with pytest.raises(ValueError, match=r"compression\.json is damaged .*; save or fetch it again"):
        facts.load_compressed(folder)


@pytest.mark.parametrize(
    "name", ["recipe", "plan", "fingerprint", "versions", "summary", "skipped", "base_model", "metrics"]
)
def test_missing_entry(saved, name):
    edit(saved[1], lambda description: description.pop(name))
    with pytest.raises(ValueError, match=rf"compression\.json is damaged \({name}: Field required\)"):
        facts.load_compressed(saved[1])


@pytest.mark.parametrize(
    "changed",
    [
        {"plan": []},
        {"recipe": "timm"},
        {"fingerprint": "0"},
        {"fingerprint": None},
        {"versions": {"facts": 1}},
        {"versions": {"facts": "newest"}},
        {"summary": {}},
        {"skipped": ["head"]},
        {"base_model": {"name": 3}},
        {"metrics": {"top1": 70.3}},
        {"buffers": {"mask": "I8"}},
        {"buffers": {"mask": 16}},
    ],
)
def test_wrong_type(saved, changed):
    edit(saved[1], lambda description: description.update(changed))
    with pytest.raises(ValueError, match=rf"compression\.json is damaged \({next(iter(changed))}"):
        facts.load_compressed(saved[1])


@pytest.mark.parametrize("text", ["[1, 2]", "null", '"a"', "1", "[" * 100_000])
def test_description_is_not_an_object(saved, text):
    (saved[1] / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=r"compression\.json is damaged"):
        facts.load_compressed(saved[1])


def test_a_newer_library(saved):
    edit(saved[1], lambda description: description["versions"].update(facts="9.2.1"))
    with pytest.raises(ValueError, match=r"was written by facts 9\.2\.1, and this is .*: pip install -U facts"):
        facts.load_compressed(saved[1])


def test_missing_description(saved):
    (saved[1] / MANIFEST).unlink()
    with pytest.raises(
        FileNotFoundError, match=r"holds no compression\.json; give a folder that save_compressed wrote"
    ):
        facts.load_compressed(saved[1])


def test_missing_weights(saved):
    (saved[1] / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        facts.load_compressed(saved[1])


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is no folder: give one that save_compressed wrote, or"):
        facts.load_compressed(tmp_path / "nowhere")


def test_network_of_another_shape(saved):
    other = TimmModel(**{**TIMM, "arguments": {**TIMM["arguments"], "num_classes": 9}}, weights="random").build()
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit .*: 2 tensors differ, .* head\.bias: \(5,"):
        facts.load_compressed(saved[1], model=other)
    assert not any(isinstance(module, LowRankLinear) for module in other.modules())  # it is as it was


def test_unwritable_folder(saved, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write to the folder"):
        facts.save_compressed(saved[0], tmp_path / "file")


@pytest.mark.parametrize("killed_at", [WEIGHTS, MANIFEST])
def test_killed_while_saving_over_an_older_one(saved, tmp_path, killed_at):
    """What is on the disk after each step but the last is refused, never taken for another network."""
    result, folder = saved
    model, shape = from_recipe()
    facts.save_compressed(compressed(model, shape, ratio=0.8), tmp_path / "newer")
    for name in (WEIGHTS, MANIFEST):
        (folder / f".{name}.x1y2z3").write_bytes((tmp_path / "newer" / name).read_bytes()[:100])  # was being written
        if name == killed_at:
            break
        (folder / name).write_bytes((tmp_path / "newer" / name).read_bytes())
    if killed_at == WEIGHTS:  # nothing was replaced yet
        assert_same(facts.load_compressed(folder), result, shape)
    else:
        with pytest.raises(ValueError, match=r"it was cut short, or only one of the two was replaced"):
            facts.load_compressed(folder)
