"""Networks that go to a hub and come back from it, by HTTP."""

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

import facts
from facts.cli import app
from facts.saving.manifest import LOADER, MANIFEST, WEIGHTS
from tests.fake_hub import TOKEN, FakeHub
from tests.saving.setting import assert_same, compressed, from_recipe

NAME = "somebody/small-vit"


@pytest.fixture(scope="module")
def result():
    return compressed(*from_recipe())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that is empty, for a user who has fetched nothing yet and is not logged in."""
    with FakeHub() as hub:
        use(hub.address, tmp_path, monkeypatch)
        yield hub


def use(address, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no_tokens"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def test_a_network_comes_back_and_without_the_hub_from_the_cache(hub, result, tmp_path, monkeypatch):
    assert facts.push_to_hub(result, NAME, token=TOKEN) == f"{hub.address}/{NAME}"
    repository = hub.repositories[NAME]
    assert f'facts.load_compressed("{NAME}")' in repository["main"]["README.md"].decode()
    assert_same(facts.load_compressed(NAME), result, (3, 32, 32))
    repository["half"] = repository.pop("main")
    assert_same(facts.load_compressed(NAME, revision="half"), result, (3, 32, 32))
    use("http://127.0.0.1:9", tmp_path, monkeypatch)  # nobody listens there
    assert_same(facts.load_compressed(NAME), result, (3, 32, 32))


def test_units_with_the_code_that_loads_them(hub, units, result):
    facts.push_to_hub(units, NAME, token=TOKEN)
    assert LOADER in hub.repositories[NAME]["main"]
    assert_same(facts.load_compressed(NAME), units, (3, 32, 32))
    facts.push_to_hub(result, NAME, token=TOKEN)
    assert LOADER not in hub.repositories[NAME]["main"]


def test_the_command_pushes_a_folder_with_its_metrics(hub, result, tmp_path, monkeypatch):
    facts.save_compressed(result, tmp_path / "vit", {"top1": {"compressed": 70.3}})
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    command = CliRunner().invoke(app, ["push", str(tmp_path / "vit"), NAME, "--private"])
    assert command.stdout == f"pushed to {hub.address}/{NAME}\n"
    assert hub.private == {NAME} and "70.3" in hub.repositories[NAME]["main"]["README.md"].decode()
    assert_same(facts.load_compressed(NAME), result, (3, 32, 32))


@pytest.mark.attack
def test_only_data_is_fetched_and_it_is_validated(hub, result, tmp_path):
    facts.push_to_hub(result, NAME, token=TOKEN)
    files = hub.repositories[NAME]["main"]
    files.update({"evil.py": b"1", "pytorch_model.bin": b"1", "other.safetensors": b"1"})
    facts.load_compressed(NAME)
    fetched = {path.name for path in (tmp_path / "cache").glob("*/snapshots/*/*")}
    assert fetched == {"README.md", MANIFEST, WEIGHTS}
    hub.repositories["a/b"] = {"main": {**files, WEIGHTS: b"\x80\x04N."}}
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        facts.load_compressed("a/b")


def test_what_the_hub_or_its_absence_refuses(hub, result, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"a/b is not a folder, and no repository could be read: 404.* Found"):
        facts.load_compressed("a/b")
    with pytest.raises(OSError, match="401"):
        facts.push_to_hub(result, NAME, token="hf_wrong")
    for name in ("small-vit", "a/b/c", "../up", "/a/b"):
        with pytest.raises(ValueError, match="is not a repository: name it as OWNER/NAME"):
            facts.push_to_hub(result, name, token=TOKEN)
    use("http://127.0.0.1:9", tmp_path, monkeypatch)
    with pytest.raises(ConnectionError, match="does not answer: save the network with save_compressed"):
        facts.push_to_hub(result, NAME, token=TOKEN)
    with pytest.raises(FileNotFoundError, match=r"a/b is not a folder, and no repository could be read: .* snapshot"):
        facts.load_compressed("a/b")
