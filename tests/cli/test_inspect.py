"""`facts inspect` shows all that is known, in words and as JSON, and says what is wrong with a folder."""

import json
import shutil

import pytest

import facts


def test_words(run, compressed):
    _, folder = compressed
    text = run("inspect", folder).output
    description = json.loads((folder / "compression.json").read_text())
    for part in ("made from: test_vit", "FLOPs", "FACTS(", "CoRSFisher(", "top1: original", "it makes the outputs"):
        assert part in text
    assert f"facts {facts.__version__}" in text
    assert description["fingerprint"] in text
    (line,) = [line for line in text.splitlines() if "blocks.0.mlp.fc1" in line]
    rank = description["plan"]["blocks.0.mlp.fc1"]
    assert line.split()[1:6] == ["192", "x", "64", str(rank), f"{rank / 64:.0%}"]


def test_json(run, compressed):
    _, folder = compressed
    assert json.loads(run("inspect", folder, "--json").stdout) == json.loads((folder / "compression.json").read_text())


def test_layers_left_dense_have_all_of_their_bar(run, photos, tmp_path):
    network = ("timm/test_byobnet", "--weights", "random", "--num-workers", 0)
    budget = ("--convolutions", "--search", "cors_fisher", "--ratio", 0.9, "--no-evaluate")
    run("compress", *network, "--data", photos, *budget, "--out", tmp_path / "net")
    plan = facts.load_compressed(tmp_path / "net").plan
    text = run("inspect", tmp_path / "net").output
    assert None in plan.values()
    for name, rank in plan.items():
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert line.split()[2] == "x"
        assert (line.split()[4:6] == ["dense", "100%"]) == (rank is None)


def test_what_others_wrote_is_shown_as_it_is(run, compressed, tmp_path):
    """Markup and the codes of a terminal style nothing."""
    folder = shutil.copytree(compressed[1], tmp_path / "vit")
    description = json.loads((folder / "compression.json").read_text())
    foreign = "a[/b] [red]:smile:\x1b[31m\x9b"
    description["base_model"]["name"] = foreign
    description["metrics"] = {foreign: {"original": 1.0, "compressed": 1.0}}
    description["skipped"] = {foreign: foreign}
    description["plan"] |= {foreign: None}
    description["summary"]["estimator"] = foreign
    (folder / "compression.json").write_text(json.dumps(description))
    text = run("inspect", folder).output
    assert text.count("a[/b] [red]:smile:[31m") == 6
    assert "\x1b" not in text and "\x9b" not in text


@pytest.mark.attack
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("compression.json", "{", "compression.json is damaged"),
        ("model.safetensors", "nothing", "model.safetensors is no whole safetensors file"),
    ],
)
def test_damaged_folders(run, compressed, tmp_path, file, content, message):
    folder = shutil.copytree(compressed[1], tmp_path / "vit")
    (folder / file).write_text(content)
    assert message in run("inspect", folder, code=1).output


def test_folders_that_are_not_whole(run, compressed, tmp_path):
    assert "holds no compression.json" in run("inspect", tmp_path, code=1).output
    folder = shutil.copytree(compressed[1], tmp_path / "vit")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors cannot be read" in run("inspect", folder, code=1).output
