"""What is saved comes back bit by bit, from JSON and safetensors alone, and damage is told plainly."""

import json
import shutil
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import facts
from experiments.train_mini import mini_recipe
from facts.models import TimmModel
from facts.models.weights import sha256
from facts.modules.lowrank import LowRankLinear
from facts.saving.manifest import MANIFEST, WEIGHTS
from tests.networks import image_batches, make_model

TINY_VIT = {"img_size": 32, "patch_size": 16, "depth": 2, "embed_dim": 48, "num_heads": 2}
TIMM = {"tag": "vit_tiny_patch16_224", "arguments": {**TINY_VIT, "num_classes": 5}}


def from_recipe():
    return TimmModel(**TIMM, weights="random").build(), (3, 32, 32)


def from_timm():
    """Not built by a recipe: found by the name that timm leaves in the model."""
    return timm.create_model("test_vit", num_classes=7).eval(), (3, 160, 160)


def mini_mambavision():
    return mini_recipe("mambavision_b").build(), (1, 32, 32)


MODELS = {"recipe": from_recipe, "timm": from_timm, "mambavision": mini_mambavision}


def compressed(model, shape, **options):
    torch.manual_seed(0)
    return facts.compress(model, estimator="pela", input_shape=shape, **options)


@pytest.fixture
def saved(tmp_path):
    """A small network by recipe, compressed, and the folder it was saved in."""
    model, shape = from_recipe()
    result = compressed(model, shape)
    facts.save_compressed(result, tmp_path / "small")
    return result, tmp_path / "small"


def assert_same(loaded, result, shape):
    dtype = next(result.model.parameters()).dtype
    images = torch.randn(2, *shape).to(dtype)
    with torch.no_grad():
        assert loaded.model(images).equal(result.model.eval()(images))
    assert {name: t.dtype for name, t in loaded.model.state_dict().items()} == {
        name: t.dtype for name, t in result.model.state_dict().items()
    }
    assert loaded.plan == result.plan
    assert loaded.summary == result.summary
    assert loaded.skipped == result.skipped
    assert not any(module.training for module in loaded.model.modules())


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("form", ["plain", "pivoted"])
    @pytest.mark.parametrize("name", MODELS)
    def test_networks_that_can_be_rebuilt(self, name, form, dtype, tmp_path):
        model, shape = MODELS[name]()
        result = compressed(model.to(dtype), shape, form=form)
        facts.save_compressed(result, tmp_path)
        assert_same(facts.load_compressed(tmp_path), result, shape)

    @pytest.mark.parametrize("search", ["uniform", "cors"])
    def test_any_network_onto_its_dense_form(self, tmp_path, search):
        batches = image_batches([4], dtype=torch.float32)
        result = facts.compress(make_model(torch.float32), batches, search=search, ratio=0.7)
        facts.save_compressed(result, tmp_path)
        loaded = facts.load_compressed(tmp_path, model=make_model(torch.float32, seed=5))
        assert_same(loaded, result, (3, 8, 8))

    def test_pivots_that_are_no_permutation_are_refused(self, tmp_path):
        model, shape = from_recipe()
        result = compressed(model.bfloat16(), shape, form="pivoted")
        layer = next(module for module in result.model.modules() if getattr(module, "order", None) is not None)
        layer.order[0] = layer.order[1]
        facts.save_compressed(result, tmp_path)
        with pytest.raises(ValueError, match=r"order is no permutation; save or fetch the network again"):
            facts.load_compressed(tmp_path)

    @pytest.mark.parametrize("layout", ["rows", "columns", "scattered rows", "scattered columns", "diagonal", None])
    def test_another_layout_of_pivots_is_refused(self, tmp_path, layout):
        model, shape = from_recipe()
        result = compressed(model, shape, form="pivoted")
        facts.save_compressed(result, tmp_path)
        manifest = json.loads((tmp_path / MANIFEST).read_text())
        name, own = next(iter(manifest["layouts"].items()))
        manifest["layouts"].pop(name)
        (tmp_path / MANIFEST).write_text(
            json.dumps(manifest | {"layouts": manifest["layouts"] | ({name: layout} if layout else {})})
        )
        if layout == own:
            assert_same(facts.load_compressed(tmp_path), result, shape)
            return
        with pytest.raises(ValueError, match=r"does not fit|is damaged"):
            facts.load_compressed(tmp_path)

    def test_a_sequential(self, tmp_path):
        def make():
            return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))

        result = facts.compress(make(), estimator="pela", layers=["2"])
        facts.save_compressed(result, tmp_path)
        with pytest.raises(
            ValueError, match="names no architecture that can be built from JSON; pass the dense network"
        ):
            facts.load_compressed(tmp_path)
        assert_same(facts.load_compressed(tmp_path, model=make()), result, (12,))

    def test_layers_left_dense(self, tmp_path):
        model, shape = from_recipe()
        result = compressed(model, shape, ratio=1)
        facts.save_compressed(result, tmp_path)
        assert_same(facts.load_compressed(tmp_path), result, shape)

    def test_loaded_network_can_be_saved_again(self, saved, tmp_path):
        result, folder = saved
        facts.save_compressed(facts.load_compressed(folder), tmp_path / "again")
        assert (tmp_path / "again" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
        assert_same(facts.load_compressed(tmp_path / "again"), result, (3, 32, 32))

    def test_saving_over_an_older_one(self, saved):
        _, folder = saved
        model, shape = from_recipe()
        other = compressed(model, shape, ratio=0.8)
        facts.save_compressed(other, folder)
        assert_same(facts.load_compressed(folder), other, shape)


def test_folder_holds_no_code(saved):
    _, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", MANIFEST, WEIGHTS]
    description = json.loads((folder / MANIFEST).read_text())
    assert description["recipe"]["kind"] == "timm"
    assert description["recipe"]["weights"] == "random"  # loading fetches nothing
    header = (folder / WEIGHTS).read_bytes()
    assert header[8:9] == b"{"  # safetensors: a length, then JSON
    assert b"pickle" not in header
    assert header[:2] not in (b"PK", b"\x80\x02")


class TestDamage:
    @pytest.mark.parametrize("keep", [0, 0.3, 0.99])
    def test_truncated_weights(self, saved, keep):
        _, folder = saved
        whole = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(whole[: int(keep * len(whole))])
        with pytest.raises(ValueError, match=r"model\.safetensors is not the file that compression\.json describes"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize("keep", [0, 0.3, 0.99])
    def test_truncated_weights_whose_fingerprint_fits(self, saved, keep):
        _, folder = saved
        whole = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(whole[: int(keep * len(whole))])
        edit(folder, lambda description: description.update(fingerprint=sha256(folder / WEIGHTS)))
        with pytest.raises(ValueError, match=r"model\.safetensors is no whole safetensors file .*; save or fetch it"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize("keep", [0, 0.3, 0.99])
    def test_truncated_description(self, saved, keep):
        _, folder = saved
        whole = (folder / MANIFEST).read_bytes()
        (folder / MANIFEST).write_bytes(whole[: int(keep * len(whole))])
        with pytest.raises(ValueError, match=r"compression\.json is damaged .*; save or fetch it again"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize(
        "name", ["recipe", "plan", "fingerprint", "versions", "summary", "skipped", "base_model", "metrics"]
    )
    def test_missing_entry(self, saved, name):
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
    def test_wrong_type(self, saved, changed):
        edit(saved[1], lambda description: description.update(changed))
        with pytest.raises(ValueError, match=rf"compression\.json is damaged \({next(iter(changed))}"):
            facts.load_compressed(saved[1])

    @pytest.mark.parametrize("text", ["[1, 2]", "null", '"a"', "1", "[" * 100_000])
    def test_description_is_not_an_object(self, saved, text):
        (saved[1] / MANIFEST).write_text(text)
        with pytest.raises(ValueError, match=r"compression\.json is damaged"):
            facts.load_compressed(saved[1])

    def test_a_newer_library(self, saved):
        edit(saved[1], lambda description: description["versions"].update(facts="9.2.1"))
        with pytest.raises(ValueError, match=r"was written by facts 9\.2\.1, and this is .*: pip install -U facts"):
            facts.load_compressed(saved[1])

    def test_missing_description(self, saved):
        (saved[1] / MANIFEST).unlink()
        with pytest.raises(
            FileNotFoundError, match=r"holds no compression\.json; give a folder that save_compressed wrote"
        ):
            facts.load_compressed(saved[1])

    def test_missing_weights(self, saved):
        (saved[1] / WEIGHTS).unlink()
        with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
            facts.load_compressed(saved[1])

    def test_missing_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere is no folder: give one that save_compressed wrote, or"):
            facts.load_compressed(tmp_path / "nowhere")

    def test_network_of_another_shape(self, saved):
        other = TimmModel(**{**TIMM, "arguments": {**TIMM["arguments"], "num_classes": 9}}, weights="random").build()
        with pytest.raises(
            ValueError, match=r"model\.safetensors does not fit .*: 2 tensors differ, .* head\.bias: \(5,"
        ):
            facts.load_compressed(saved[1], model=other)
        assert not any(isinstance(module, LowRankLinear) for module in other.modules())  # it is as it was

    def test_unwritable_folder(self, saved, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="cannot write to the folder"):
            facts.save_compressed(saved[0], tmp_path / "file")

    @pytest.mark.parametrize("killed_at", [WEIGHTS, MANIFEST])
    def test_killed_while_saving_over_an_older_one(self, saved, tmp_path, killed_at):
        """What is on the disk after each step but the last is refused, never taken for another network."""
        result, folder = saved
        model, shape = from_recipe()
        facts.save_compressed(compressed(model, shape, ratio=0.8), tmp_path / "newer")
        for name in (WEIGHTS, MANIFEST):
            (folder / f".{name}.x1y2z3").write_bytes(
                (tmp_path / "newer" / name).read_bytes()[:100]
            )  # was being written
            if name == killed_at:
                break
            (folder / name).write_bytes((tmp_path / "newer" / name).read_bytes())
        if killed_at == WEIGHTS:  # nothing was replaced yet
            assert_same(facts.load_compressed(folder), result, shape)
        else:
            with pytest.raises(ValueError, match=r"it was cut short, or only one of the two was replaced"):
                facts.load_compressed(folder)


class TestDescription:
    def test_origin_of_a_recipe(self, tmp_path):
        recipe = mini_recipe("deit_b")
        result = compressed(recipe.build(), (1, 16, 16))
        facts.save_compressed(result, tmp_path)
        base_model = json.loads((tmp_path / MANIFEST).read_text())["base_model"]
        assert base_model == {
            "name": recipe.tag,
            "source": "mini_deit.safetensors",
            "sha256": sha256(recipe.checkpoint()),
        }
        facts.save_compressed(facts.load_compressed(tmp_path), tmp_path / "again")
        assert json.loads((tmp_path / "again" / MANIFEST).read_text())["base_model"] == base_model

    def test_origin_of_weights_that_are_gone(self, tmp_path):
        recipe = mini_recipe("deit_b")
        shutil.copy(recipe.checkpoint(), tmp_path / "mine.safetensors")
        model = replace(recipe, weights=str(tmp_path / "mine.safetensors")).build()
        (tmp_path / "mine.safetensors").unlink()
        facts.save_compressed(compressed(model, (1, 16, 16)), tmp_path / "saved")
        description = (tmp_path / "saved" / MANIFEST).read_text()
        assert json.loads(description)["base_model"] == {"name": recipe.tag, "source": "mine.safetensors"}
        assert str(tmp_path) not in description  # where it lay is nobody's business

    @pytest.mark.parametrize("read", [True, False])
    def test_origin_of_a_network_of_timm(self, tmp_path, monkeypatch, read):
        """timm does not say whether weights are the published ones; the file does, where this machine has it."""
        model = timm.create_model("test_vit", num_classes=7).eval()
        published = tmp_path / "model.safetensors"
        save_file((model if read else timm.create_model("test_vit")).state_dict(), published)
        monkeypatch.setattr("facts.saving.provenance.fetched", lambda repository: published)
        facts.save_compressed(compressed(model, (3, 160, 160)), tmp_path / "saved")
        base_model = json.loads((tmp_path / "saved" / MANIFEST).read_text())["base_model"]
        assert base_model["name"] == ("test_vit.r160_in1k" if read else "test_vit")
        assert base_model.get("repository") == ("timm/test_vit.r160_in1k" if read else None)
        assert base_model.get("sha256") == (sha256(published) if read else None)

    def test_versions_and_fingerprint(self, saved):
        description = json.loads((saved[1] / MANIFEST).read_text())
        assert description["versions"] == {
            "facts": facts.__version__,
            "torch": torch.__version__.partition("+")[0],
            "timm": timm.__version__,
        }
        assert description["fingerprint"] == sha256(saved[1] / WEIGHTS)

    def test_metrics(self, saved):
        result, folder = saved
        metrics = {"top1": {"original": 72.1, "compressed": 70.3}, "loss": {"compressed": 1}}
        facts.save_compressed(result, folder, metrics)
        assert json.loads((folder / MANIFEST).read_text())["metrics"] == metrics

    @pytest.mark.parametrize("metrics", [{"top1": 70.3}, {"top1": {"after": 70.3}}, {"top1": {"original": "high"}}, 3])
    def test_metrics_of_another_shape(self, saved, tmp_path, metrics):
        with pytest.raises(ValueError, match=r'metrics must be numbers by name, such as \{"top1": \{"original": 72\.1'):
            facts.save_compressed(saved[0], tmp_path / "new", metrics)
        assert not (tmp_path / "new").exists()


def test_numbers_of_several_types_keep_them(tmp_path):
    """Each tensor comes back in its own type."""
    model, shape = from_recipe()
    result = compressed(model, shape)
    result.model.head.to(torch.float64)
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path).model
    assert {name: t.dtype for name, t in loaded.state_dict().items()} == {
        name: t.dtype for name, t in result.model.state_dict().items()
    }
    assert loaded.head.weight.equal(result.model.head.weight)


@pytest.mark.parametrize(
    ("tag", "options"),
    [
        ("test_vit", {"drop_path_rate": 0.1, "drop_rate": 0.2, "proj_drop_rate": 0.3, "attn_drop_rate": 0.05}),
        ("test_vit", {"img_size": [64, 32], "in_chans": 1, "global_pool": "avg"}),
        ("swin_tiny_patch4_window7_224", {"img_size": [56, 56], "window_size": 7, "drop_path_rate": 0.3}),
        ("test_convnext", {"in_chans": 1, "drop_path_rate": 0.2, "drop_rate": 0.4}),
        ("resnet26", {"global_pool": "max", "in_chans": 4, "drop_rate": 0.1}),
    ],
)
def test_a_network_of_timm_comes_back_with_the_options_in_common_use(tag, options, tmp_path):
    model = timm.create_model(tag, num_classes=16, **options).eval()
    shape = (options.get("in_chans", 3), *options.get("img_size", (160, 160)))
    one_layer = {"resnet26": ["fc"], "swin_tiny_patch4_window7_224": ["layers.0.blocks.0.mlp.fc1"]}
    result = compressed(model, shape, layers=one_layer.get(tag))
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path)
    assert_same(loaded, result, shape)
    assert repr(loaded.model) == repr(result.model), "dropout counts once it is trained"


def test_a_network_of_timm_that_was_changed_asks_for_it(tmp_path):
    model = timm.create_model("resnet26", num_classes=16).eval()
    model.global_pool = torch.nn.Sequential(torch.nn.AdaptiveMaxPool2d(1), torch.nn.Flatten())
    result = compressed(model, (3, 64, 64), layers=["fc"])
    facts.save_compressed(result, tmp_path)
    assert_same(facts.load_compressed(tmp_path, model=model), result, (3, 64, 64))


@pytest.mark.parametrize("ratio", [0.5, 1])
def test_1x1_convolutions(tmp_path, ratio):
    model = timm.create_model("test_convnext", num_classes=7, conv_mlp=True).eval()
    result = compressed(model, (3, 64, 64), convolutions=True, ratio=ratio)
    assert any(name.endswith(".linear") for name in result.plan)
    facts.save_compressed(result, tmp_path)
    fresh = timm.create_model("test_convnext", num_classes=7, conv_mlp=True)
    assert_same(facts.load_compressed(tmp_path, model=fresh), result, (3, 64, 64))


@pytest.mark.parametrize(
    ("tag", "options"),
    [
        ("test_vit", {"act_layer": "relu"}),
        ("test_vit", {"num_heads": 4}),  # which no module prints
        ("resnet26", {"output_stride": 16}),
    ],
)
def test_a_network_of_timm_with_rare_options_asks_for_it(tag, options, tmp_path, caplog):
    """Names and shapes are those of the name's defaults; what it computes is not."""
    model = timm.create_model(tag, num_classes=16, **options).eval()
    layers = ["fc"] if tag == "resnet26" else None
    result = compressed(model, (3, 160, 160), layers=layers)
    facts.save_compressed(result, tmp_path)
    assert "the saved network will have to be loaded onto a given one" in caplog.text
    with pytest.raises(ValueError, match="names no architecture that can be built from JSON; pass the dense network"):
        facts.load_compressed(tmp_path)
    assert_same(facts.load_compressed(tmp_path, model=model), result, (3, 160, 160))


@pytest.mark.parametrize(
    ("tag", "options"),
    [
        ("swin_tiny_patch4_window7_224", {"depths": (2, 2), "num_heads": (2, 4)}),
        ("swinv2_cr_tiny_ns_224", {"depths": (2, 2), "num_heads": (2, 4)}),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_buffers_that_are_in_no_file_keep_their_types(tag, options, given, tmp_path):
    """Swin's masks must be of the type of its weights."""
    size = {"img_size": 64, "window_size": 4, "embed_dim": 24}
    recipe = TimmModel(tag=tag, arguments={**size, **options, "num_classes": 5}, weights="random")
    result = compressed(recipe.build().bfloat16(), (3, 64, 64))
    facts.save_compressed(result, tmp_path)
    assert "BF16" in json.loads((tmp_path / MANIFEST).read_text())["buffers"].values()
    loaded = facts.load_compressed(tmp_path, model=recipe.build() if given else None)
    assert_same(loaded, result, (3, 64, 64))
    theirs = dict(loaded.model.named_buffers())
    assert all(theirs[name].equal(buffer) for name, buffer in result.model.named_buffers())


def test_types_of_buffers_may_be_left_out(saved):
    edit(saved[1], lambda description: description.pop("buffers"))
    assert_same(facts.load_compressed(saved[1]), saved[0], (3, 32, 32))


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        layer = nn.Linear(64, 64)
        self.a, self.b = nn.Sequential(layer, nn.GELU()), nn.Sequential(layer, nn.GELU())

    def forward(self, x):
        return self.b(self.a(x))


def test_a_layer_under_two_names(tmp_path):
    result = facts.compress(Shared(), estimator="pela", input_shape=(64,))
    result.model.b[0] = result.model.a[0]
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path, model=Shared())
    assert_same(loaded, result, (64,))
    assert loaded.model.a[0] is loaded.model.b[0]


def edit(folder, change):
    description = json.loads((folder / MANIFEST).read_text())
    change(description)
    (folder / MANIFEST).write_text(json.dumps(description))
