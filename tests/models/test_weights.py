"""Checkpoints: found, fetched, read and loaded strictly, without any network; torchvision's too."""

import argparse
import hashlib
import json
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import timm.data
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from PIL import Image
from safetensors.torch import save_file
from torchvision import models

import facts
import facts.models.weights as weights
from facts.models import MambaVision, MambaVisionModel, TimmModel, TorchvisionModel
from facts.models.mambavision import VARIANTS
from tests.refusals import refuses
from tests.saving.setting import assert_same, compressed

TINY = {"depths": [0, 0, 2, 2], "dims": [4, 4, 16, 16], "heads": [2, 2], "windows": [4, 2], "stem_dim": 4}
REPOSITORY = "nvidia/MambaVision-B-1K"


def tiny(**fields) -> MambaVisionModel:
    return MambaVisionModel(variant="B", arguments=TINY, **fields)


@pytest.fixture
def tensors():
    return tiny(weights="random").build().state_dict()


def as_published(tensors):
    """Under the names of the repositories' files."""
    return {f"model.{name}".replace("gamma_", "g_"): tensor for name, tensor in tensors.items()}


def assert_loaded(model, tensors):
    assert all(tensor.equal(tensors[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("variant", "size"), [("B", 390_807_536), ("L", 911_925_488)])
def test_names_as_published_give_files_of_the_published_size(variant, size):
    """The header of a safetensors file holds every name, so its length is a check on all of them together."""
    with torch.device("meta"):
        published = as_published(MambaVision(**VARIANTS[variant]).state_dict())
    header, offset = '{"__metadata__":{"format":"pt"}', 0
    for name in sorted(published, key=lambda name: (-published[name].element_size(), name)):
        tensor = published[name]
        end = offset + tensor.nbytes
        shape, dtype = str(list(tensor.shape)).replace(" ", ""), {4: "F32", 8: "I64"}[tensor.element_size()]
        header += f',"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{offset},{end}]}}'
        offset = end
    assert 8 + -(-(len(header) + 1) // 8) * 8 + offset == size


@pytest.fixture
def hub(tmp_path, monkeypatch, tensors):
    """A Hugging Face cache that holds one published file; nothing can be fetched."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub/models--nvidia--MambaVision-B-1K"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("commit")
    (repository / "snapshots/commit").mkdir(parents=True)
    save_file(as_published(tensors), repository / "snapshots/commit/model.safetensors")
    monkeypatch.setattr(weights, "hf_hub_download", lambda *args: pytest.fail("fetched"))
    return repository / "snapshots/commit/model.safetensors"


def test_published_weights_are_fetched_once(hub, tensors, monkeypatch, tmp_path):
    assert tiny().checkpoint() == hub
    assert_loaded(tiny().build(), tensors)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    asked = []
    monkeypatch.setattr(weights, "hf_hub_download", lambda *args, **_: asked.append(args) or str(hub))
    assert tiny().checkpoint() is None
    assert_loaded(tiny().build(), tensors)
    assert asked == [(REPOSITORY, "model.safetensors")]


def test_a_relative_path_is_first_that_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "ROOT", tmp_path / "installed")
    (tmp_path / "installed").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "installed", tmp_path):
        (folder / "mine.pth").touch()
        assert weights.find_checkpoint("mine.pth").resolve() == folder / "mine.pth"
    with pytest.raises(FileNotFoundError, match=r"a folder of published ones\.$"):  # as checkpoints=random gives
        weights.find_checkpoint("random/deit_tiny/mine.pth")


def test_weights_in_several_files_are_fetched_with_their_index(tmp_path, monkeypatch, tensors):
    halves = [dict(list(tensors.items())[part::2]) for part in (0, 1)]
    shards = {f"model-0000{i}-of-00002.safetensors": half for i, half in enumerate(halves, start=1)}
    places = {tensor: name for name, half in shards.items() for tensor in half}
    asked = []

    def download(_, name, **options):
        asked.append(name)
        if name == "model.safetensors":
            raise RemoteEntryNotFoundError("there is none", response=Mock())
        if name in shards:
            save_file(shards[name], tmp_path / name)
        else:
            (tmp_path / name).write_text(json.dumps({"weight_map": places}))
        return str(tmp_path / name)

    monkeypatch.setattr(weights, "hf_hub_download", download)
    path = weights.fetch("someone/large")
    assert asked == ["model.safetensors", "model.safetensors.index.json", *shards]
    read = weights.read_checkpoint(path)
    assert read.keys() == tensors.keys() and all(read[name].equal(tensors[name]) for name in tensors)
    assert weights.sha256(path) == " ".join(weights.sha256(tmp_path / name) for name in shards)


def test_offline_the_repository_and_what_to_do_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    error = LocalEntryNotFoundError("no connection\nand a page of advice")
    monkeypatch.setattr(weights, "hf_hub_download", Mock(side_effect=error))
    repository = "timm/deit_small_patch16_224.fb_in1k"
    with pytest.raises(FileNotFoundError, match=rf"{repository} could not be fetched: connect .*folder"):
        TimmModel(tag="deit_small_patch16_224").build()


@pytest.mark.parametrize("name", ["MambaVision-B-1K.pth.tar", "MambaVision-B-1K/model.safetensors"])
def test_a_folder_takes_the_place_of_the_hub(name, tensors, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(as_published(tensors), path)
    else:
        # Compiled, in several processes.
        wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
        torch.save({"epoch": 300, "args": argparse.Namespace(lr=0.1), "state_dict": wrapped}, path)
    recipe = tiny(weights=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"looked for .*MambaVision-L-1K\.safetensors.*-1K/model\.safetensors"):
        replace(recipe, variant="L").build()
    assert_loaded(recipe.build(), tensors)
    assert recipe.provenance() == {"source": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


SWIN = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]}


def swin(**fields) -> TimmModel:
    return TimmModel(tag="swin_tiny_patch4_window7_224", arguments={**SWIN, **fields.pop("arguments", {})}, **fields)


def test_names_and_buffers_of_older_files_are_read_as_timm_reads_them(tmp_path):
    tensors = swin(weights="random").build().state_dict()
    older = {
        name.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc", "head"): tensor
        for name, tensor in tensors.items()
    }
    older["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
    save_file(older, tmp_path / "older.safetensors")
    assert_loaded(swin(weights=str(tmp_path / "older.safetensors")).build(), tensors)


def test_the_checkpoint_of_another_network_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file(swin(weights="random", arguments={"window_size": 2, "depths": [2, 3]}).build().state_dict(), path)
    message = r"17 tensors differ, .*relative_position_bias_table: \(9, 2\) instead of \(49, 2\)"
    refuses(rf"{re.escape(str(path))} does not fit this SwinTransformer: .*{message}", swin(weights=str(path)).build)


@pytest.mark.parametrize(
    "content", [b"", b"half", b"<html>not found</html>", b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_file_that_is_none_or_cut_short_is_one_clear_error(content, tmp_path, tensors):
    save_file(tensors, tmp_path / "page.safetensors")
    torch.save(tensors, tmp_path / "page.pth")
    for path in (tmp_path / "page.pth", tmp_path / "page.safetensors"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == b"half" else content)
        refuses(r"page.* cannot be read \([^\n]*\); fetch it again", weights.read_checkpoint, path)


@pytest.mark.parametrize("content", [{"state_dict": 3}, {0: torch.ones(2)}])
def test_a_file_of_anything_but_named_tensors_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other.pth is not a checkpoint: give a file of named tensors"):
        weights.read_checkpoint(tmp_path / "other.pth")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"head": 3}}'])
def test_a_damaged_index_is_one_clear_error(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json is no index with a `weight_map` .*; fetch it again"):
        weights.read_checkpoint(tmp_path / "model.safetensors.index.json")


def on_meta(tag):
    with torch.device("meta"):
        return TorchvisionModel(tag=tag).architecture()


@pytest.mark.parametrize("tag", ["resnet50", "swin_v2_t", "efficientnet_b3"])
def test_images_are_prepared_as_torchvision_does(tag):
    image = Image.effect_noise((300, 420), 90).convert("RGB")
    ours = timm.data.create_transform(**timm.data.resolve_model_data_config(on_meta(tag)))(image)
    torch.testing.assert_close(ours, models.get_model_weights(tag).DEFAULT.transforms()(image))


def test_published_weights_and_a_saved_network(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    recipe = TorchvisionModel(tag="squeezenet1_1")
    assert recipe.checkpoint() is None
    (tmp_path / "checkpoints").mkdir()
    file = tmp_path / "checkpoints" / recipe.published.url.rpartition("/")[2]
    torch.save(models.squeezenet1_1().state_dict(), file)
    result = compressed(recipe.build(), (3, 64, 64), layers="all")
    facts.save_compressed(result, tmp_path / "saved")
    loaded = facts.load_compressed(tmp_path / "saved")
    assert_same(loaded, result, (3, 64, 64))
    assert loaded.model.provenance["source"] == file.name and "repository" not in loaded.model.provenance
