"""MambaVision; checkpoints: found, fetched, read and loaded strictly, without any network; the hub's refusals."""

import argparse
import hashlib
import json
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import timm.data
import torch
import torch.nn.functional as F
from huggingface_hub import errors
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision import models

import facts
import facts.models.weights as weights
from facts.models import MambaVision, MambaVisionModel, TimmModel, TorchvisionModel
from facts.models.mambavision import VARIANTS, MambaMixer, SelectiveScan
from facts.utils.hub import refusal
from tests.refusals import refused, refuses
from tests.saving.setting import assert_same, compressed

TINY = {"depths": [0, 0, 2, 2], "dims": [4, 4, 16, 16], "heads": [2, 2], "windows": [4, 2], "stem_dim": 4}
# Published: 31.8, 35.1, 50.1, 97.7, 227.9 and 241.5 M; the last two are cut off, not rounded.
MILLIONS = {"T": 31.79, "T2": 35.10, "S": 50.14, "B": 97.69, "L": 227.96, "L2": 241.55}


@pytest.mark.parametrize(("variant", "expected"), MILLIONS.items())
def test_parameter_counts_are_the_published_ones(variant, expected):
    with torch.device("meta"):
        parameters = MambaVision(**VARIANTS[variant]).parameters()
    assert round(sum(parameter.numel() for parameter in parameters) / 1e6, 2) == expected


def sequential_scan(x, delta, A, B, C, skip):
    state = x.new_zeros(*x.shape[:2], A.shape[1])
    outputs = []
    for step in range(x.shape[2]):
        decay = torch.exp(delta[:, :, step, None] * A)
        state = decay * state + (delta[:, :, step] * x[:, :, step])[:, :, None] * B[:, None, :, step]
        outputs.append((state * C[:, None, :, step]).sum(2) + skip * x[:, :, step])
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 49])
def test_parallel_scan_is_the_sequential_recurrence(length):
    shapes = ((2, 6, length), (2, 6, length), (6, 4), (2, 4, length), (2, 4, length), (6,))
    x, delta, A, *others = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    arguments = [tensor.requires_grad_() for tensor in (x, F.softplus(delta), -A.exp(), *others)]
    parallel, sequential = SelectiveScan()(*arguments), sequential_scan(*arguments)
    torch.testing.assert_close(parallel, sequential, rtol=0, atol=1e-12)
    weights = torch.randn_like(parallel)
    sums = (parallel * weights).sum(), (sequential * weights).sum()
    ours, literal = (torch.autograd.grad(each, arguments, materialize_grads=True) for each in sums)
    torch.testing.assert_close(ours, literal, rtol=1e-12, atol=1e-12)


def test_tokens_of_a_window_see_one_another_alone():
    """Windows of 4 x 4 on a map of 8 x 8: a change in the last column reaches the right half of the map."""
    stage = MambaVision(**TINY).eval().double().levels[2]
    stage.downsample = nn.Identity()
    maps = torch.randn(2, 16, 8, 8, dtype=torch.float64)
    changed = maps.clone()
    changed[1, :, :, 7] = torch.randn(16, 8, dtype=torch.float64)
    differs = (stage(maps) != stage(changed)).any(dim=1)
    assert not differs[0].any() and not differs[1, :, :4].any() and differs[1, :, 4:].all()


def test_the_step_bias_enters_twice():
    mixer = MambaMixer(32).double()
    nn.init.normal_(mixer.dt_proj.bias)
    projected, scanned = [], []
    mixer.x_proj.register_forward_hook(lambda module, inputs, output: projected.append(output))
    mixer.scan.register_forward_pre_hook(lambda module, inputs: scanned.append(inputs[1]))
    mixer(torch.randn(3, 5, 32, dtype=torch.float64))
    assert projected[0].shape == (15, 2 + 8 + 8)
    delta = F.softplus(projected[0][:, :2] @ mixer.dt_proj.weight.T + 2 * mixer.dt_proj.bias)
    torch.testing.assert_close(scanned[0].transpose(1, 2).flatten(0, 1), delta)


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


def test_published_weights_are_fetched_once(tensors, monkeypatch, tmp_path):
    """From a Hugging Face cache that holds the published file, or else from the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(weights, "hf_hub_download", lambda *args: pytest.fail("fetched"))
    repository = tmp_path / "hub/models--nvidia--MambaVision-B-1K"
    hub = repository / "snapshots/commit/model.safetensors"
    for path in (repository / "refs/main", hub):
        path.parent.mkdir(parents=True)
    (repository / "refs/main").write_text("commit")
    save_file(as_published(tensors), hub)
    assert tiny().checkpoint() == hub
    assert_loaded(tiny().build(), tensors)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    asked = []
    monkeypatch.setattr(weights, "hf_hub_download", lambda *args, **_: asked.append(args) or str(hub))
    assert tiny().checkpoint() is None
    assert_loaded(tiny().build(), tensors)
    assert asked == [("nvidia/MambaVision-B-1K", "model.safetensors")]


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
    shards = {f"model-0000{1 + i}-of-00002.safetensors": dict(list(tensors.items())[i::2]) for i in (0, 1)}
    places = {tensor: name for name, half in shards.items() for tensor in half}
    asked = []

    def download(_, name, **options):
        asked.append(name)
        if name == "model.safetensors":
            raise errors.RemoteEntryNotFoundError("there is none", response=Mock())
        if name in shards:
            save_file(shards[name], tmp_path / name)
        else:
            (tmp_path / name).write_text(json.dumps({"weight_map": places}))
        return str(tmp_path / name)

    monkeypatch.setattr(weights, "hf_hub_download", download)
    path = weights.fetch("someone/large")
    assert asked == ["model.safetensors", "model.safetensors.index.json", *shards]
    torch.testing.assert_close(weights.read_checkpoint(path), dict(tensors), rtol=0, atol=0)
    assert weights.sha256(path) == " ".join(weights.sha256(tmp_path / name) for name in shards)


def test_offline_the_repository_and_what_to_do_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    error = errors.LocalEntryNotFoundError("no connection\nand a page of advice")
    monkeypatch.setattr(weights, "hf_hub_download", Mock(side_effect=error))
    words = r"timm/deit_small_patch16_224.fb_in1k could not be fetched: connect .*folder"
    refuses(words, TimmModel(tag="deit_small_patch16_224").build, raised=FileNotFoundError)


def fetch_with(kind, status, monkeypatch):
    def failing(*_, **__):
        try:
            raise kind("many\nlines", response=Mock(status_code=status))
        except kind as error:
            raise errors.LocalEntryNotFoundError("more\nlines") from error

    monkeypatch.setattr(weights, "hf_hub_download", failing)
    monkeypatch.setattr(weights, "offline", lambda: False)
    weights.fetch("me/it")


LICENCE = "me/it has a licence: accept it at https://.*/me/it, then log in with `hf auth login`"
test_each_refusal_of_the_hub_is_a_line_that_helps = refused(
    (errors.RepositoryNotFoundError, 401, "answers with 401; there is no me/it, or it is private: "),
    (errors.GatedRepoError, 403, LICENCE),
    (errors.HfHubHTTPError, 403, "your account may not use me/it: log in with `hf auth login` as somebody who may"),
    (errors.RepositoryNotFoundError, 404, "answers with 404; there is no me/it: check the name"),
    (errors.HfHubHTTPError, 503, "answers with 503; try again later"),
    by=fetch_with,
    error=FileNotFoundError,
)


def test_what_is_no_refusal_has_other_words():
    assert not refusal(errors.RemoteEntryNotFoundError("no such file", response=Mock(status_code=404)), "me/it")
    assert not refusal(OSError("no network"), "me/it")


@pytest.mark.parametrize("name", ["MambaVision-B-1K.pth.tar", "MambaVision-B-1K/model.safetensors"])
def test_a_folder_takes_the_place_of_the_hub(name, tensors, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(as_published(tensors), path)
    else:
        wrapped = {f"module._orig_mod.{name}": each for name, each in tensors.items()}  # compiled, in several processes
        torch.save({"epoch": 300, "args": argparse.Namespace(lr=0.1), "state_dict": wrapped}, path)
    recipe = tiny(weights=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"looked for .*MambaVision-L-1K\.safetensors.*-1K/model\.safetensors"):
        replace(recipe, variant="L").build()
    assert_loaded(recipe.build(), tensors)
    assert recipe.provenance() == {"source": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def swin(**fields) -> TimmModel:
    sizes = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]}
    return TimmModel(tag="swin_tiny_patch4_window7_224", arguments={**sizes, **fields.pop("arguments", {})}, **fields)


def test_names_and_buffers_of_older_files_are_read_as_timm_reads_them(tmp_path):
    tensors = swin(weights="random").build().state_dict()
    older = {name.replace("1.down", "0.down").replace("head.fc", "head"): each for name, each in tensors.items()}
    older["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
    save_file(older, tmp_path / "older.safetensors")
    assert_loaded(swin(weights=str(tmp_path / "older.safetensors")).build(), tensors)


def test_the_checkpoint_of_another_network_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file(swin(weights="random", arguments={"window_size": 2, "depths": [2, 3]}).build().state_dict(), path)
    message = r"17 tensors differ, .*relative_position_bias_table: \(9, 2\) instead of \(49, 2\)"
    refuses(rf"{re.escape(str(path))} does not fit this SwinTransformer: .*{message}", swin(weights=str(path)).build)


@pytest.mark.parametrize("content", [b"", b"half", b"<html></html>", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_none_or_cut_short_is_one_clear_error(content, tmp_path, tensors):
    save_file(tensors, tmp_path / "page.safetensors")
    torch.save(tensors, tmp_path / "page.pth")
    for path in (tmp_path / "page.pth", tmp_path / "page.safetensors"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == b"half" else content)
        refuses(r"page.* cannot be read \([^\n]*\); fetch it again", weights.read_checkpoint, path)


def test_files_of_anything_but_named_tensors_and_damaged_indices_are_refused(tmp_path):
    for content in ({"state_dict": 3}, {0: torch.ones(2)}):
        torch.save(content, path := tmp_path / "other.pth")
        refuses("other.pth is not a checkpoint: give a file of named tensors", weights.read_checkpoint, path)
    for text in ("{", "[]", "{}", '{"weight_map": {"head": 3}}'):
        (path := tmp_path / "model.safetensors.index.json").write_text(text)
        refuses(r"index\.json is no index with a `weight_map` .*; fetch it again", weights.read_checkpoint, path)


@pytest.mark.parametrize("tag", ["resnet50", "swin_v2_t", "efficientnet_b3"])
def test_images_are_prepared_as_torchvision_does(tag):
    image = Image.effect_noise((300, 420), 90).convert("RGB")
    with torch.device("meta"):
        network = TorchvisionModel(tag=tag).architecture()
    ours = timm.data.create_transform(**timm.data.resolve_model_data_config(network))(image)
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
