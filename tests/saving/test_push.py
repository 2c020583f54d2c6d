"""Networks that go to a hub and come back from it, by HTTP."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from huggingface_hub import constants

import facts
from facts.models import TimmModel
from facts.saving.manifest import MANIFEST, WEIGHTS
from facts.saving.push import push_to_hub
from tests.fake_hub import READER, TOKEN, FakeHub

VIT = {"img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 48, "num_heads": 2, "num_classes": 5}
NAME = "somebody/small-vit"
PULL = """
import sys, torch, facts
from safetensors.torch import load_file, save_file
network = facts.load_compressed(sys.argv[1]).model
with torch.no_grad():
    save_file({"outputs": network(load_file(sys.argv[2])["images"])}, sys.argv[2])
"""


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    model = TimmModel(tag="vit_tiny_patch16_224", arguments=VIT, weights="random").build()
    return facts.compress(facts.prepare(model, input_shape=(3, 32, 32)), estimator="pela")


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


def outputs(result, images):
    with torch.no_grad():
        return result.model(images)


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32)


class TestRoundTrip:
    def test_the_same_outputs(self, hub, result, images):
        address = push_to_hub(result, NAME, token=TOKEN, metrics={"top1": {"compressed": 70.3}})
        assert address == f"{hub.address}/{NAME}"
        loaded = facts.load_compressed(NAME)
        assert outputs(loaded, images).equal(outputs(result, images))
        assert loaded.plan == result.plan
        card = hub.repositories[NAME]["main"][-1]["README.md"].decode()
        assert f'facts.load_compressed("{NAME}")' in card and "70.3" in card

    @pytest.mark.system
    def test_in_a_fresh_process(self, hub, result, images, tmp_path):
        from safetensors.torch import load_file, save_file

        push_to_hub(result, NAME, token=TOKEN)
        save_file({"images": images}, tmp_path / "exchanged")
        environment = os.environ | {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        }
        subprocess.run([sys.executable, "-c", PULL, NAME, tmp_path / "exchanged"], check=True, env=environment)
        assert load_file(tmp_path / "exchanged")["outputs"].equal(outputs(result, images))

    def test_a_branch(self, hub, result, images):
        push_to_hub(result, NAME, token=TOKEN, revision="half")
        assert MANIFEST not in hub.files(NAME, "main")
        assert outputs(facts.load_compressed(NAME, revision="half"), images).equal(outputs(result, images))
        with pytest.raises(FileNotFoundError, match="holds no compression"):
            facts.load_compressed(NAME)
        with pytest.raises(FileNotFoundError, match=f"{NAME} has no such revision: give a branch, tag or commit"):
            facts.load_compressed(NAME, revision="third")

    def test_a_private_repository(self, hub, result, images):
        push_to_hub(result, NAME, token=TOKEN, private=True)
        with pytest.raises(FileNotFoundError, match=rf"{NAME}: check the name; if it is private, log in with"):
            facts.load_compressed(NAME)
        loaded = facts.load_compressed(NAME, token=READER)
        assert outputs(loaded, images).equal(outputs(result, images))

    def test_what_was_fetched_before_is_there_without_the_hub(self, hub, result, images, tmp_path, monkeypatch):
        push_to_hub(result, NAME, token=TOKEN)
        facts.load_compressed(NAME)
        use(f"http://127.0.0.1:{unused_port()}", tmp_path, monkeypatch)
        assert outputs(facts.load_compressed(NAME), images).equal(outputs(result, images))

    def test_pushed_again(self, hub, result):
        push_to_hub(result, NAME, token=TOKEN)
        push_to_hub(result, NAME, token=TOKEN, metrics={"top1": {"compressed": 71.9}})
        assert b"71.9" in hub.files(NAME, "main")["README.md"]  # the card is ours, and renewed
        hub.repositories[NAME]["main"].append({**hub.files(NAME, "main"), "README.md": b"Mine."})
        push_to_hub(result, NAME, token=TOKEN)
        assert hub.files(NAME, "main")["README.md"] == b"Mine."


class TestHarm:
    def test_only_data_is_fetched(self, hub, result, tmp_path):
        push_to_hub(result, NAME, token=TOKEN)
        hub.files(NAME, "main").update({"evil.py": b"1", "pytorch_model.bin": b"1", "other.safetensors": b"1"})
        facts.load_compressed(NAME)
        fetched = {path.name for path in (tmp_path / "cache").glob("*/snapshots/*/*")}
        assert fetched == {"README.md", MANIFEST, WEIGHTS}

    def test_a_pickle_instead_of_the_weights(self, hub, result):
        push_to_hub(result, NAME, token=TOKEN)
        hub.files(NAME, "main")[WEIGHTS] = b"\x80\x04N."
        with pytest.raises(ValueError, match=r"model\.safetensors is a pickle"):
            facts.load_compressed(NAME)

    def test_other_weights_than_described(self, hub, result):
        push_to_hub(result, NAME, token=TOKEN)
        hub.files(NAME, "main")[WEIGHTS] += b" "
        with pytest.raises(ValueError, match=r"model\.safetensors is not the file that compression\.json describes"):
            facts.load_compressed(NAME)


class TestErrors:
    def test_no_such_repository(self, hub):
        with pytest.raises(
            FileNotFoundError, match=rf"no folder a/b is here, and {hub.address} shows no repository a/b"
        ):
            facts.load_compressed("a/b")

    def test_a_gated_repository(self, hub, result):
        push_to_hub(result, NAME, token=TOKEN)
        hub.gated.add(NAME)
        with pytest.raises(PermissionError, match=f"{NAME} is gated: ask for access at {hub.address}/{NAME}"):
            facts.load_compressed(NAME, token=READER)

    def test_no_token(self, hub, result):
        with pytest.raises(PermissionError, match="pushing to somebody/small-vit takes a token: log in with `hf auth"):
            push_to_hub(result, NAME)

    @pytest.mark.parametrize("token", [READER, "hf_wrong"])
    def test_a_token_that_may_not_write(self, hub, result, token):
        with pytest.raises(
            PermissionError, match=rf"does not let this token near {NAME}: give token= one that may write"
        ):
            push_to_hub(result, NAME, token=token)

    @pytest.mark.parametrize("name", ["small-vit", "a/b/c", "../up", "/a/b"])
    def test_no_name_of_a_repository(self, result, name):
        with pytest.raises(ValueError, match="is no repository: name it as OWNER/NAME"):
            push_to_hub(result, name, token=TOKEN)

    def test_no_hub(self, result, tmp_path, monkeypatch):
        address = f"http://127.0.0.1:{unused_port()}"
        use(address, tmp_path, monkeypatch)
        with pytest.raises(ConnectionError, match=f"{address} does not answer: save_compressed keeps the network here"):
            push_to_hub(result, NAME, token=TOKEN)
        with pytest.raises(ConnectionError, match=f"is not on this machine, and {address} does not answer: connect it"):
            facts.load_compressed(NAME)


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
