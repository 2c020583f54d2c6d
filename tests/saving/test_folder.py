"""What is saved comes back bit by bit, from JSON and safetensors alone, and damage is told plainly."""

import json

import pytest
import timm
import torch
from torch import nn

import facts
from facts.models import TimmModel
from facts.saving.manifest import MANIFEST, WEIGHTS
from tests.networks import image_batches, make_model
from tests.saving.setting import MODELS, assert_same, compressed, edit, from_recipe


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

    def test_a_network_of_ones_own_class_by_its_function(self, tmp_path):
        batches = image_batches([4], dtype=torch.float32)
        result = facts.compress(make_model(torch.float32), batches, search="uniform", ratio=0.7)
        facts.save_compressed(result, tmp_path)
        assert_same(facts.load_compressed(tmp_path, architecture="tests.networks:make_model"), result, (3, 8, 8))

    @pytest.mark.parametrize(
        ("architecture", "reason"),
        [
            ("no_such_module:f", "there is no function 'no_such_module:f' .*: name one as package.module:function"),
            ("tests.networks:nothing", "there is no function 'tests.networks:nothing'"),
            ("a b", "there is no function 'a b'"),
            ("builtins:list", "builtins:list returns a list, and is to return the dense network"),
        ],
    )
    def test_a_function_that_builds_no_network(self, tmp_path, architecture, reason):
        facts.save_compressed(compressed(*from_recipe()), tmp_path)
        with pytest.raises(ValueError, match=reason):
            facts.load_compressed(tmp_path, architecture=architecture)
        with pytest.raises(ValueError, match="give one of them"):
            facts.load_compressed(tmp_path, make_model(), architecture=architecture)

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
    assert "weights" not in description["recipe"]  # they are in the folder
    header = (folder / WEIGHTS).read_bytes()
    assert header[8:9] == b"{"  # safetensors: a length, then JSON
    assert b"pickle" not in header
    assert header[:2] not in (b"PK", b"\x80\x02")


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
    result = compressed(model, (3, 64, 64), layers="all", ratio=ratio)
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
    result = facts.compress(facts.prepare(Shared(), input_shape=(64,)), estimator="pela")
    result.model.b[0] = result.model.a[0]
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path, model=Shared())
    assert_same(loaded, result, (64,))
    assert loaded.model.a[0] is loaded.model.b[0]
