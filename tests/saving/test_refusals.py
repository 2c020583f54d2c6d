"""Folders made by hand to do harm: each is refused, with the reason, before anything of it is built or run."""

import io
import json
import os
import pickle
import shutil
import time

import pytest
import torch
from torch import nn

import facts
from facts.models import CausalLM, OpenMMLabModel, TimmModel
from facts.models.weights import sha256
from facts.saving.manifest import MANIFEST, WEIGHTS
from tests.saving.setting import saved_vit

pytestmark = pytest.mark.attack


class Harmful:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return saved_vit(tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "saved")


@pytest.fixture
def never_built(monkeypatch):
    """Fails where a network is built."""
    for recipe in (TimmModel, CausalLM, OpenMMLabModel):
        monkeypatch.setattr(recipe, "architecture", lambda self: pytest.fail("it was built"))


def edit(folder, change, file=MANIFEST):
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


@pytest.mark.usefixtures("never_built")
class TestFiles:
    @pytest.mark.parametrize("protocol", range(2, 6))
    @pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "model.safetensors", ".hidden"])
    def test_pickles_under_another_name(self, folder, tmp_path, name, protocol):
        (folder / name).write_bytes(pickle.dumps(Harmful(tmp_path / "it_ran"), protocol))
        with pytest.raises(ValueError, match=rf"{name} is a pickle, which runs code .* Remove the file if you trust"):
            facts.load_compressed(folder)
        assert not (tmp_path / "it_ran").exists()

    def test_a_file_of_torch_under_another_name(self, folder, tmp_path):
        buffer = io.BytesIO()
        torch.save(Harmful(tmp_path / "it_ran"), buffer)
        (folder / WEIGHTS).write_bytes(buffer.getvalue())
        with pytest.raises(ValueError, match=r"model\.safetensors is an archive, as PyTorch's pickles are"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize(
        "name",
        ["a.pkl", "b.pt", "c.PTH", "d.bin", "e.ckpt", "f.py", "g.so", "h.pt2", "i.npy", "j", "sub/k.py", "l.zip"],
    )
    def test_kinds_that_are_not_known_to_be_data(self, folder, name):
        (folder / "sub").mkdir()
        (folder / name).write_text("harmless")
        with pytest.raises(
            ValueError, match=rf"{name} is of no kind that is known to be data: a saved network is JSON"
        ):
            facts.load_compressed(folder)

    def test_a_program_under_another_name(self, folder):
        (folder / "figure.png").write_bytes(b"\x7fELF\x02\x01")
        with pytest.raises(ValueError, match=r"figure\.png is a program"):
            facts.load_compressed(folder)

    def test_a_pipe_that_would_be_waited_for(self, folder):
        os.mkfifo(folder / "notes.txt")
        with pytest.raises(ValueError, match=r"notes\.txt is no file with content"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize("name", [WEIGHTS, MANIFEST, "notes.txt"])
    def test_links_out_of_the_folder(self, folder, tmp_path, name):
        (tmp_path / "secret").write_text("mine")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("../secret")
        with pytest.raises(
            ValueError, match=rf"{name} is a link to .*secret, outside of the folder: put the file itself"
        ):
            facts.load_compressed(folder)

    def test_a_link_to_a_folder_outside(self, folder, tmp_path):
        (folder / "sub").symlink_to(tmp_path)
        with pytest.raises(ValueError, match=r"sub is a link to .*, outside of the folder"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize("blobs", ["../../../secret", "../../blobs/../../secret"])
    def test_links_that_only_look_like_those_of_a_cache(self, folder, tmp_path, blobs):
        (tmp_path / "secret").write_text("mine")
        snapshot = tmp_path / "repository" / "snapshots" / "main"
        snapshot.parent.mkdir(parents=True)
        (tmp_path / "repository" / "blobs").mkdir()
        folder.rename(snapshot)
        (snapshot / "notes.txt").symlink_to(blobs)
        with pytest.raises(ValueError, match=r"notes\.txt is a link to .*secret, outside of the folder"):
            facts.load_compressed(snapshot)

    @pytest.mark.parametrize(
        "settings",
        [
            {"auto_map": {"AutoTokenizer": ["a--b.C", None]}},
            {"vocab_file": "/etc/passwd"},
            {"fast_tokenizer_files": ["tokenizer.1/../../secret.json"]},
            {"init_inputs": ["/etc/passwd"]},
            {"custom_generate": "somebody/code"},
        ],
    )
    def test_settings_that_name_files_or_code(self, folder, settings):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json sets {next(iter(settings))} to .*: remove it"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize(("text", "fault"), [("{", "no JSON"), ("[]", "no JSON object"), ("[" * 10**5, "no JSON")])
    def test_settings_that_are_none(self, folder, text, fault):
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"generation_config\.json is {fault}.*: save or fetch it again"):
            facts.load_compressed(folder)


def test_what_may_lie_beside(folder):
    (folder / "LICENSE").write_text("free")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_bytes(b"PK\x03\x04")
    (folder / "figures").mkdir()
    (folder / "figures" / "ranks.png").write_bytes(b"\x89PNG")
    (folder / "notes.txt").symlink_to("README.md")
    (folder / "link.md").symlink_to(folder / "README.md")
    facts.load_compressed(folder)


def test_a_cache_of_links_to_blobs(folder, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0f"
    snapshot.mkdir(parents=True)
    folder.rename(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    facts.load_compressed(snapshot)


@pytest.mark.usefixtures("never_built")
class TestRecipes:
    @pytest.mark.parametrize(
        ("changed", "fault"),
        [
            ({"kind": "keras"}, "is of 'keras', which this version cannot build; pass the dense network as model="),
            ({"kind": ["timm"]}, r"is of \['timm'\]"),
            ({"code": "print()"}, "Unexpected keyword argument"),
            ({"weights": "pretrained"}, "weights are 'pretrained', and may only be 'random'"),
            ({"weights": "../mine.pth"}, "weights are '../mine.pth'"),
            ({"tag": "hf-hub:somebody/model"}, "is no tag of timm's own, but a repository or a folder"),
            ({"tag": "local-dir:/etc"}, "is no tag of timm's own, but a repository or a folder"),
            ({"tag": "../vit"}, "is no tag of timm's own, but a repository or a folder"),
            ({"arguments": {"pretrained": True}}, "arguments pretrained would have timm load something"),
            ({"arguments": {"checkpoint_path": "evil"}}, "arguments checkpoint_path would have timm load"),
            ({"arguments": {"cache_dir": "there"}}, "arguments cache_dir would have timm load"),
            ({"arguments": {"pretrained_cfg": {"file": "evil"}}}, "arguments pretrained_cfg would have timm load"),
            (
                {"arguments": {"pretrained_cfg_overlay": {"file": "evil"}}},
                "pretrained_cfg_overlay would have timm load",
            ),
            (
                {"arguments": {"pretrained_cfg_overlay": {"source": "hub"}}},
                "pretrained_cfg_overlay would have timm load",
            ),
            ({"arguments": {"pretrained_cfg_overlay": "file"}}, "pretrained_cfg_overlay would have timm load"),
            (
                {"arguments": {"act_layer": "https://example.com"}},
                "arguments.act_layer is 'https://example.com', and may",
            ),
            (
                {"arguments": {"depths": [1, ["/etc/passwd"]]}},
                "arguments.depths is '/etc/passwd', and may name no file",
            ),
        ],
    )
    def test_of_timm(self, folder, changed, fault):
        edit(folder, lambda description: description["recipe"].update(changed))
        with pytest.raises(ValueError, match=rf"compression\.json is .*{fault}" if "is of" not in fault else fault):
            facts.load_compressed(folder)

    @pytest.mark.parametrize(
        ("changed", "fault"),
        [
            (
                {"config": "/elsewhere/evil.py"},
                "is no name of a file among the library's configurations, which are code",
            ),
            ({"config": "../../evil.py"}, "is no name of a file among the library's configurations"),
            ({"config": "..\\evil.py"}, "is no name of a file among the library's configurations"),
            ({"config": "swin/evil.json"}, "is no name of a file among the library's configurations"),
            ({"arguments": {"backbone.type": "os.system"}}, "arguments set type to 'os.system'"),
            ({"arguments": {"backbone": {"type": "evil"}}}, "arguments set type to 'evil'"),
            ({"arguments": {"neck": [{"norm_cfg.type": ["GN"]}]}}, r"arguments set type to \['GN'\]"),
            ({"arguments": {"neck.init_cfg": {"checkpoint": "evil"}}}, "arguments set init_cfg to"),
            ({"arguments": {"neck.init_cfg.checkpoint": "evil"}}, "arguments set init_cfg to 'evil'"),
            ({"arguments": {"pretrained": "evil"}}, "arguments set pretrained to 'evil'"),
            ({"arguments": {"backbone._delete_": True}}, "arguments set _delete_ to True"),
            ({"arguments": {"neck.file": "a/b"}}, "arguments.neck.file is 'a/b', and may name no file"),
            ({"classifier": {"tag": "vit", "weights": "evil.pth"}}, "names a classifier to be loaded"),
        ],
    )
    def test_of_openmmlab(self, folder, changed, fault):
        recipe = {"kind": "openmmlab", "toolbox": "mmdet", "config": "swin/a.py", "weights": "random", **changed}
        edit(folder, lambda description: description.update(recipe=recipe))
        with pytest.raises(ValueError, match=rf"compression\.json is refused: [\s\S]*{fault}"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize(
        ("changed", "fault"),
        [
            ({"configuration": None, "tag": "somebody/model"}, "has no configuration, which a saved network holds"),
            ({"configuration": {"auto_map": {"AutoConfig": "a.B"}}}, "sets auto_map to"),
            ({"configuration": {"text_config": [{"auto_map": {}}]}}, "sets auto_map to"),
            ({"configuration": {"quantization_config": {"quant_method": "awq"}}}, "sets quantization_config to"),
            ({"configuration": {"attribute_map": {"a": "_attn_implementation"}}}, "sets attribute_map to"),
            ({"configuration": {"attn_implementation": "flash_attention_2"}}, "sets attn_implementation to"),
            ({"configuration": {"_attn_implementation": ["sdpa"]}}, "sets _attn_implementation to"),
            (
                {"configuration": {"attn_implementation": "somebody/kernel"}},
                "is 'somebody/kernel', and may name no file",
            ),
            ({"configuration": {"__dict__": {"a": 1}}}, "sets __dict__ to"),
            ({"arguments": {"attn_implementation": "flash_attention_3"}}, "sets attn_implementation to"),
        ],
    )
    def test_of_transformers(self, folder, changed, fault):
        recipe = {"kind": "transformers", "configuration": {"model_type": "llama"}, "weights": "random", **changed}
        edit(folder, lambda description: description.update(recipe=recipe))
        with pytest.raises(ValueError, match=rf"compression\.json is refused: .*{fault}"):
            facts.load_compressed(folder)


def test_no_configuration_of_openmmlab_from_elsewhere():
    with pytest.raises(ValueError, match="is no name of a file among the library's configurations, which are code"):
        OpenMMLabModel(toolbox="mmdet", config="/home/me/mine.py", weights="random")


def test_arguments_that_the_library_does_not_take(folder):
    edit(folder, lambda description: description["recipe"]["arguments"].update(colour="red"))
    with pytest.raises(ValueError, match=r"vit_tiny_patch16_224 cannot be built as it was saved: .*colour"):
        facts.load_compressed(folder)


class TestPlans:
    @pytest.mark.parametrize("rank", [True, 3.0, "3", 0, -1, [3], 1e400])
    def test_ranks_that_are_none(self, folder, rank):
        edit(folder, lambda description: description["plan"].update({"blocks.0.mlp.fc1": rank}))
        with pytest.raises(
            ValueError, match=r"compression\.json is damaged \(plan\.blocks\.0\.mlp\.fc1.*; save or fetch"
        ):
            facts.load_compressed(folder)

    @pytest.mark.parametrize("rank", [49, 10**6, 10**30])
    def test_ranks_that_the_layer_cannot_have(self, folder, rank):
        edit(folder, lambda description: description["plan"].update({"blocks.0.mlp.fc1": rank}))
        fault = rf"rank {rank} of 'blocks\.0\.mlp\.fc1', which is 192 x 48, may be 48 at most"
        with pytest.raises(ValueError, match=rf"the plan does not fit this VisionTransformer: {fault}"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize("rank", [3, None])
    @pytest.mark.parametrize(
        ("name", "fault"),
        [
            ("blocks.9.mlp.fc1", "there is none of that name"),
            ("blocks.0.norm1", "it is of type LayerNorm"),
            ("patch_embed.proj", "it is of type Conv2d"),
            ("patch_embed.proj.linear", "there is none of that name"),  # it is no 1x1 convolution
            ("", "it is of type VisionTransformer"),
            ("__class__", "there is none of that name"),
        ],
    )
    def test_layers_that_are_not_there_or_not_linear(self, folder, name, fault, rank):
        edit(folder, lambda description: description["plan"].update({name: rank}))
        with pytest.raises(ValueError, match=rf"the plan does not fit .*: '{name}' is no linear layer \({fault}\)"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize("rank", [3, None])
    def test_ranks_that_are_not_those_of_the_weights(self, folder, rank):
        edit(folder, lambda description: description["plan"].update({"blocks.0.mlp.fc1": rank}))
        with pytest.raises(
            ValueError, match=r"model\.safetensors does not fit this VisionTransformer: .* tensors differ"
        ):
            facts.load_compressed(folder)

    def test_a_network_too_large_to_build(self, folder):
        """It is never allocated: the weights that there are do not fit it."""
        edit(folder, lambda description: description["recipe"]["arguments"].update(embed_dim=60_000))
        with pytest.raises(ValueError, match=r"model\.safetensors does not fit this VisionTransformer"):
            facts.load_compressed(folder)

    def test_a_network_of_too_many_layers_to_sketch(self, folder):
        """Building goes no further than the weights that there are could reach."""
        edit(folder, lambda description: description["recipe"]["arguments"].update(depth=9_999))
        start = time.monotonic()
        with pytest.raises(ValueError, match=r"cannot be built as it was saved: it has more than \d+ parameters"):
            facts.load_compressed(folder)
        assert time.monotonic() - start < 10
        nn.Sequential(*(nn.Linear(1, 1) for _ in range(1000)))  # which is bounded no longer


def test_weights_of_another_kind_of_number(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "head.bias": tensors["head.bias"].long()}, folder / WEIGHTS)
    edit(folder, lambda description: description.update(fingerprint=sha256(folder / WEIGHTS)))
    with pytest.raises(ValueError, match=r"head\.bias: I64 instead of torch\.float32"):
        facts.load_compressed(folder)


SWIN = {"img_size": 64, "window_size": 4, "depths": [2, 2], "embed_dim": 24, "num_heads": [2, 2], "num_classes": 12}


@pytest.fixture(scope="module")
def swin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swin")
    model = TimmModel(tag="swin_tiny_patch4_window7_224", arguments=SWIN, weights="random").build()
    facts.save_compressed(facts.compress(facts.prepare(model, input_shape=(3, 64, 64)), estimator="pela"), folder)
    return folder


class TestSizes:
    """Small folders that would take gigabytes, or for ever."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"img_size": 20_000}, "would need .* GiB for tensors that no file holds"),
            ({"window_size": 200, "img_size": 6400}, "would need .* GiB for tensors|does not fit"),
            ({"depths": [10**8, 1]}, r"recipe\.arguments\.depths\.0 is 100000000, which no network has"),
            ({"img_size": 10**9}, r"recipe\.arguments\.img_size is 1000000000, which no network has"),
            ({"num_heads": [1] * 20_000}, r"recipe\.arguments\.num_heads has 20,000 entries, too many"),
        ],
    )
    def test_recipes(self, swin, tmp_path, arguments, message):
        folder = shutil.copytree(swin, tmp_path / "saved")
        edit(folder, lambda description: description["recipe"]["arguments"].update(arguments))
        start = time.monotonic()
        with pytest.raises(ValueError, match=message):
            facts.load_compressed(folder)
        assert time.monotonic() - start < 5

    def test_a_large_manifest(self, folder):
        with (folder / MANIFEST).open("ab") as file:
            file.truncate(2**29)
        with pytest.raises(ValueError, match=r"has more than 134,217,728 bytes, too many for JSON"):
            facts.load_compressed(folder)
        with (folder / MANIFEST).open("ab") as file:
            file.truncate(2**25)
        with pytest.raises(ValueError, match=r"has 33,554,432 bytes, and 4,194,304 are allowed"):
            facts.load_compressed(folder)

    def test_a_large_header(self, folder):
        size = 2**25
        (folder / WEIGHTS).write_bytes(size.to_bytes(8, "little") + b"{" + b" " * size)
        edit(folder, lambda description: description.update(fingerprint=sha256(folder / WEIGHTS)))
        with pytest.raises(ValueError, match=r"has a header of 33,554,432 bytes, and 8,388,608 are allowed"):
            facts.load_compressed(folder)

    def test_a_large_file_is_not_hashed_before_its_header_fits(self, folder, monkeypatch):
        """A sparse one of 100 GB takes no room on the disk."""
        monkeypatch.setattr("facts.saving.folder.sha256", lambda path: pytest.fail("it was hashed"))
        header = json.dumps({"x": {"dtype": "F32", "shape": [25 * 10**9], "data_offsets": [0, 10**11]}}).encode()
        with (folder / WEIGHTS).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 10**11)
        with pytest.raises(ValueError, match=r"it has more than 16 parameters|is no whole safetensors file"):
            facts.load_compressed(folder)


@pytest.mark.parametrize("name", [".hidden", ".profile", ".json", ".env.py.d"])
def test_hidden_files(folder, name):
    (folder / name).write_text("{}")
    with pytest.raises(ValueError, match="is of no kind that is known to be data"):
        facts.load_compressed(folder)


def test_files_of_git_and_of_the_hub_are_not_read(folder):
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    for name in (".git", ".cache"):
        (folder / name).mkdir()
        (folder / name / "HEAD").write_bytes(b"\x80\x04")
    assert facts.load_compressed(folder).plan


def test_weights_that_are_no_numbers(original, folder):
    network = facts.load_compressed(original)
    with torch.no_grad():
        network.model.blocks[0].mlp.fc1.bias[0] = torch.nan
    facts.save_compressed(network, folder)
    with pytest.raises(ValueError, match=r"model\.safetensors: blocks\.0\.mlp\.fc1\.bias holds NaN or infinity"):
        facts.load_compressed(folder)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_metrics_that_are_no_numbers(original, folder, value):
    with pytest.raises(ValueError, match="metrics must be numbers by name"):
        facts.save_compressed(facts.load_compressed(original), folder, {"top1": {"original": value}})
    edit(folder, lambda description: description.update(metrics={"top1": {"original": value}}))
    with pytest.raises(ValueError, match=r"compression\.json is damaged \(metrics\.top1\.original"):
        facts.load_compressed(folder)
