"""Saves that are killed or run at once, and manifests changed at random: what is loaded is whole, or it is refused."""

import json
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import facts
from facts.saving.manifest import MANIFEST, WEIGHTS, Manifest
from tests.saving.edits import put
from tests.saving.setting import compressed, from_recipe

pytestmark = pytest.mark.attack


@pytest.mark.parametrize("killed_at", [WEIGHTS, MANIFEST])
def test_a_save_killed_over_an_older_network(killed_at, tmp_path):
    """After each step but the last, the folder holds the older network or is refused."""
    model, shape = from_recipe()
    facts.save_compressed(compressed(model, shape), tmp_path / "saved")
    facts.save_compressed(compressed(model, shape, ratio=0.8), tmp_path / "newer")
    older = facts.load_compressed(tmp_path / "saved")
    if killed_at == MANIFEST:
        shutil.copy(tmp_path / "newer" / WEIGHTS, tmp_path / "saved")
    (tmp_path / "saved" / f".{killed_at}.x1y2z3").write_bytes((tmp_path / "newer" / killed_at).read_bytes()[:100])
    if killed_at == WEIGHTS:
        assert facts.load_compressed(tmp_path / "saved").plan == older.plan
    else:
        with pytest.raises(ValueError, match="does not fit"):
            facts.load_compressed(tmp_path / "saved")


def test_of_two_saves_at_once_no_mix_is_loaded(tmp_path, monkeypatch):
    """Networks of one plan; the second save replaces the weights after the first has written its own."""
    first, second = (compressed(*from_recipe(), form="plain") for _ in range(2))
    recipe = facts.saving.save.recipe_of_result

    def meanwhile(result):
        if result is first:
            facts.save_compressed(second, tmp_path / "second")
            shutil.copy(tmp_path / "second" / WEIGHTS, tmp_path / "saved")
        return recipe(result)

    monkeypatch.setattr("facts.saving.save.recipe_of_result", meanwhile)
    facts.save_compressed(first, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"is not the file that compression\.json describes"):
        facts.load_compressed(tmp_path / "saved")


def test_a_bit_of_the_manifest(originals, tmp_path):
    """It is noticed, or changes nothing that is read; files without a checksum are still read."""
    text = (originals["vit"] / MANIFEST).read_bytes()
    whole, num_noticed = Manifest.read(originals["vit"]), 0
    for place in range(0, len(text), 5):
        changed = bytearray(text)
        changed[place] ^= 1 << place % 8
        (tmp_path / MANIFEST).write_bytes(changed)
        try:
            assert replace(Manifest.read(tmp_path), checksum=None) == replace(whole, checksum=None)
        except ValueError:
            num_noticed += 1
    assert num_noticed > len(text) / 5 - 5
    (tmp_path / MANIFEST).write_bytes(text)
    put("edited", "skipped", "head")(tmp_path)
    assert Manifest.read(tmp_path).skipped["head"] == "edited"


def places(content, place=()):
    """Every place of a nested value, branches before what they hold."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in items:
        yield (*place, name)
        yield from places(value, (*place, name))


NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 10**6, 10**12, 2**63, 0.5, -0.1, 1.5, 1e300])
WORDS = st.text(st.characters(exclude_characters="\n"), max_size=8)  # which errors repeat
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(WORDS, SCALARS, max_size=2)


@pytest.mark.system
@settings(max_examples=100)
@given(st.data())
def test_a_manifest_with_any_other_value_is_loaded_or_refused(originals, tmp_path_factory, data):
    folder = shutil.copytree(originals["vit"], tmp_path_factory.mktemp("changed") / "saved")
    manifest = json.loads((folder / MANIFEST).read_text())
    put(data.draw(VALUES), *data.draw(st.sampled_from(list(places(manifest)))))(folder)
    try:
        facts.load_compressed(folder)
    except (ValueError, OSError) as error:
        assert "\n" not in str(error)
