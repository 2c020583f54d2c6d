"""A network on the hub comes back, with a card of what was measured."""

import re
import shutil
from dataclasses import replace
from fnmatch import fnmatch
from unittest.mock import Mock

import pytest
import torch
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from torch import nn
from typer.testing import CliRunner

import facts
from facts.cli import app
from facts.cost.count import Cost
from facts.result import Summary
from facts.saving.manifest import LOADER, MANIFEST, WEIGHTS
from facts.saving.save import CARD
from tests.refusals import refuses
from tests.saving.setting import assert_same

NAME, ADDRESS = "somebody/small-vit", "https://hub.example"
METRICS = {"top1": {"original": 97.25, "compressed": 95.5}, "seen": {"compressed": 0.0}}


def card_of(result, folder, metrics=None):
    facts.save_compressed(result, folder, metrics)
    _, head, body = (folder / CARD).read_text().split("---\n", 2)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
    return yaml.safe_load(head), body, {name: cells for name, *cells in lines}


def test_costs_metrics_and_origin(result, tmp_path, monkeypatch):
    published = replace(result.model.recipe, tag="vit_tiny_patch16_224.augreg_in21k", weights="pretrained")
    monkeypatch.setattr(result.model, "recipe", published)
    timed = result.with_summary(latency={"dense": 0.004, "measured": 0.002, "samples": 8})
    head, body, rows = card_of(timed, tmp_path, METRICS)
    repository = "timm/vit_tiny_patch16_224.augreg_in21k"
    assert head == {"library_name": "facts", "base_model": repository, "tags": ["facts", "compression"]}
    assert f"- licence: the original's, see https://huggingface.co/{repository}" in body
    summary = result.summary
    assert rows["FLOPs (G)"] == [f"{each.flops / 1e9:.4g}" for each in (summary.before, summary.after)]
    assert rows["parameters (M)"] == [f"{each.params / 1e6:.4g}" for each in (summary.before, summary.after)]
    assert rows["file (MB)"] == ["", f"{(tmp_path / 'model.safetensors').stat().st_size / 1e6:.4g}"]
    names = ("latency of a batch of 8 (ms)", "top1", "seen")
    assert [rows[name] for name in names] == [["4", "2"], ["97.25", "95.5"], ["", "0"]]
    assert f"- method: {summary.estimator}, {summary.search}" in body
    assert ("pivoted" in body) == (summary.form == "pivoted")
    assert f"facts {facts.__version__}, torch " in body and "- budget: 0.5 of the flops of the compressed parts" in body


def test_unknown_values_are_left_out(result, tmp_path):
    head, body, rows = card_of(replace(result, summary=Summary(Cost(None, 10), Cost(None, 5))), tmp_path)
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
    assert names["network"](inputs).equal(result.model(inputs))


def test_an_edited_card_is_kept_and_others_are_renewed(result, tmp_path):
    card_of(result, tmp_path)
    assert "97.25" in card_of(result, tmp_path, METRICS)[1]
    mine = (tmp_path / CARD).read_bytes().replace(b"0.5", b"0.6")
    (tmp_path / CARD).write_bytes(mine)
    facts.save_compressed(result, tmp_path)
    assert (tmp_path / CARD).read_bytes() == mine


class FakeHub:
    """Stands for huggingface_hub: a folder for each branch of a repository, and a cache of what was fetched."""

    def __init__(self, folder):
        self.folder, self.cache, self.private, self.answers = folder / "hub", folder / "cache", set(), True

    def create_repo(self, name, *, private, exist_ok):
        (self.folder / name / "main").mkdir(parents=True, exist_ok=exist_ok)
        self.private |= {name} if private else set()
        return f"{ADDRESS}/{name}"

    def hf_hub_download(self, name, file, *, local_dir):
        if not (source := self.folder / name / "main" / file).exists():
            raise RemoteEntryNotFoundError("404", response=Mock())
        shutil.copy(source, local_dir)

    def upload_folder(self, *, repo_id, folder_path, delete_patterns):
        branch = self.folder / repo_id / "main"
        for path in branch.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in delete_patterns):
                path.unlink()
        shutil.copytree(folder_path, branch, dirs_exist_ok=True)

    def snapshot_download(self, name, *, revision, token, allow_patterns, local_files_only):
        source, target = (place / name / (revision or "main") for place in (self.folder, self.cache))
        if local_files_only and not target.exists():
            raise LocalEntryNotFoundError("no snapshot")
        if not local_files_only:
            if not source.exists():
                raise RepositoryNotFoundError("404", response=Mock(status_code=404))
            target.mkdir(parents=True)
            for file in filter_repo_objects([path.name for path in source.iterdir()], allow_patterns=allow_patterns):
                shutil.copy(source / file, target)
        return str(target)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that is empty, for a user who has fetched nothing yet."""
    hub = FakeHub(tmp_path)
    monkeypatch.setattr("facts.saving.save.HfApi", lambda token: hub)
    monkeypatch.setattr("facts.saving.save.answers", lambda: hub.answers)
    monkeypatch.setattr("facts.saving.load.offline", lambda: not hub.answers)
    monkeypatch.setattr("facts.saving.load.snapshot_download", hub.snapshot_download)
    return hub


def test_a_network_comes_back_and_without_the_hub_from_the_cache(hub, result):
    assert facts.push_to_hub(result, NAME) == f"{ADDRESS}/{NAME}"
    repository = hub.folder / NAME
    assert f'facts.load_compressed("{NAME}")' in (repository / "main" / "README.md").read_text()
    assert_same(facts.load_compressed(NAME), result, (3, 32, 32))
    (repository / "main").rename(repository / "half")
    assert_same(facts.load_compressed(NAME, revision="half"), result, (3, 32, 32))
    hub.answers = False
    assert_same(facts.load_compressed(NAME), result, (3, 32, 32))


def test_units_with_the_code_that_loads_them(hub, units, result):
    facts.push_to_hub(units, NAME)
    branch = hub.folder / NAME / "main"
    assert (branch / LOADER).exists()
    assert_same(facts.load_compressed(NAME), units, (3, 32, 32))
    (branch / "README.md").write_bytes(mine := (branch / "README.md").read_bytes().replace(b"0.5", b"0.6"))
    facts.push_to_hub(result, NAME)
    assert not (branch / LOADER).exists() and (branch / "README.md").read_bytes() == mine  # an edited card is kept


def test_the_command_pushes_a_folder_with_its_metrics(hub, result, tmp_path):
    facts.save_compressed(result, tmp_path / "vit", {"top1": {"compressed": 70.3}})
    command = CliRunner().invoke(app, ["push", str(tmp_path / "vit"), NAME, "--private"])
    assert command.stdout == f"pushed to {ADDRESS}/{NAME}\n"
    assert hub.private == {NAME} and "70.3" in (hub.folder / NAME / "main" / "README.md").read_text()
    assert_same(facts.load_compressed(NAME), result, (3, 32, 32))


@pytest.mark.attack
def test_only_data_is_fetched_and_it_is_validated(hub, result):
    facts.push_to_hub(result, NAME)
    shutil.copytree(hub.folder / NAME, hub.folder / "a/b")
    for name in ("evil.py", "pytorch_model.bin", "other.safetensors"):
        (hub.folder / NAME / "main" / name).write_bytes(b"1")
    facts.load_compressed(NAME)
    assert {path.name for path in (hub.cache / NAME / "main").iterdir()} == {"README.md", MANIFEST, WEIGHTS}
    (hub.folder / "a/b/main" / WEIGHTS).write_bytes(b"\x80\x04N.")
    refuses(r"model\.safetensors is not a whole safetensors file", facts.load_compressed, "a/b")


def test_what_the_hub_or_its_absence_refuses(hub, result):
    with pytest.raises(FileNotFoundError, match=r"a/b is not a folder, .*could be read: .* 404; there is no a/b"):
        facts.load_compressed("a/b")
    for name in ("small-vit", "a/b/c", "../up", "/a/b"):
        refuses("is not a repository: name it as OWNER/NAME", facts.push_to_hub, result, name)
    hub.answers = False
    with pytest.raises(ConnectionError, match="does not answer, so nothing was pushed: try again"):
        facts.push_to_hub(result, NAME)
    with pytest.raises(FileNotFoundError, match=r"a/b is not a folder, and no repository could be read: .* snapshot"):
        facts.load_compressed("a/b")
