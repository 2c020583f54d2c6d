"""Folders of quantized networks: small, the same outputs again, and refused if they are damaged or hostile."""

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import facts
from facts.cli.inspect import shapes
from facts.models.weights import sha256
from facts.modules.quantized import quantization_of
from facts.saving.manifest import MANIFEST, WEIGHTS, Manifest
from tests.saving.setting import TINY_VIT, assert_same, compressed, edit, from_recipe, from_timm

pytest.importorskip("torchao", reason="the extra `quantization` is not installed: pip install -e '.[quantization]'")

NAME = "blocks.0.attn.qkv.weight"  # of a layer that stays dense
STORED, SCALES = (
    "blocks.0.attn.qkv.parametrizations.weight.original",
    ("blocks.0.attn.qkv.parametrizations.weight.0.scales"),
)


@pytest.fixture
def folder(tmp_path):
    """A small network, quantized but not compressed, and saved."""
    model, _ = from_recipe()
    facts.save_compressed(facts.quantize(model, "int4"), tmp_path / "small")
    return tmp_path / "small"


def replace_tensor(folder, name, change):
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, name: change(tensors[name])}, folder / WEIGHTS)
    edit(folder, lambda manifest: manifest.update(fingerprint=sha256(folder / WEIGHTS)))


@pytest.mark.parametrize("form", ["plain", "pivoted", None])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("build", [from_recipe, from_timm])
def test_the_same_outputs_come_back(build, weights, form, tmp_path):
    model, shape = build()
    result = facts.quantize(compressed(model, shape, form=form) if form else model, weights)
    facts.save_compressed(result, tmp_path / "small")
    assert_same(facts.load_compressed(tmp_path / "small"), result, shape)


def test_files_are_smaller(tmp_path):
    """Of a network whose weights are nearly all in linear layers: a quarter, and an eighth and scales."""
    model = timm.create_model("vit_tiny_patch16_224", **{**TINY_VIT, "embed_dim": 256, "depth": 3}, num_classes=5)
    sizes = {}
    for weights in ("int8", "int4"):
        facts.save_compressed(facts.quantize(model, weights), tmp_path / weights)
        sizes[weights] = sum(file.stat().st_size for file in (tmp_path / weights).iterdir())
    dense = sum(parameter.nbytes for parameter in model.parameters())
    linear = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, nn.Linear))
    assert sizes["int8"] < dense - 0.74 * linear
    assert sizes["int4"] < dense - 0.83 * linear


def test_a_network_of_your_own(tmp_path):
    def build():
        return nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 5))

    result = facts.quantize(build(), "int4", group_size=7)
    facts.save_compressed(result, tmp_path / "small")
    loaded = facts.load_compressed(tmp_path / "small", model=build())
    assert_same(loaded, result, (24,))


def test_the_card_and_the_summary_tell(folder, tmp_path):
    fact = "9 weights in int4, one scale for groups of 32"
    assert f"quantized: {fact}" in repr(facts.load_compressed(folder))
    card = (folder / "README.md").read_text()
    assert f"A network, quantized with facts: {fact}." in card.replace("`vit_tiny_patch16_224`", "A network")
    assert "- quantized\n" in card and "low-rank" not in card and "Ranks" not in card and "estimator" not in card
    model, shape = from_recipe()
    facts.save_compressed(facts.quantize(compressed(model, shape)), tmp_path / "both")
    card = (tmp_path / "both" / "README.md").read_text()
    assert "- low-rank\n- quantized\n" in card and "quantization: 17 weights in int8, one scale for each row" in card


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("form", ["plain", "pivoted"])
def test_inspection_finds_the_shapes(form, weights, tmp_path):
    model, shape = from_recipe()
    result = compressed(model, shape, form=form)
    facts.save_compressed(facts.quantize(result, weights), tmp_path)
    found = shapes(tmp_path / WEIGHTS, Manifest.read(tmp_path))
    assert found.keys() == result.plan.keys()
    for name, shape in found.items():  # of four bits, two are in a byte: an odd size is not told from the next
        layer = model.get_submodule(name)
        exact = layer.out_features, layer.in_features
        assert shape == (exact if weights == "int8" else tuple(size + size % 2 for size in exact))


@pytest.mark.attack
class TestRefusals:
    @pytest.mark.parametrize(
        "changed",
        [
            {"weights": "int2"},
            {"weights": 8},
            {"group_size": 0},
            {"group_size": 1},
            {"group_size": -32},
            {"group_size": 32.0},
            {"group_size": True},
            {"tensors": NAME},
            {"tensors": [3]},
        ],
    )
    def test_values_that_are_none(self, folder, changed):
        edit(folder, lambda manifest: manifest["quantization"].update(changed))
        with pytest.raises(ValueError, match=rf"compression\.json is damaged \(quantization\.{next(iter(changed))}"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize(
        "name",
        [
            NAME,  # a second time
            "blocks.0.attn.qkv.bias",
            "blocks.0.attn.qkv.left",
            "blocks.0.attn.qkv",
            "blocks.0.norm1.weight",
            "patch_embed.proj.weight",
            "pos_embed",
            "blocks.9.attn.qkv.weight",
            "blocks.0.attn.qkv.__class__",
            "",
        ],
    )
    def test_weights_of_no_linear_layer(self, folder, name):
        edit(folder, lambda manifest: manifest["quantization"]["tensors"].append(name))
        fault = rf"the quantization does not fit this VisionTransformer: '{name}' is no weight of a linear layer, or is"
        with pytest.raises(ValueError, match=fault):
            facts.load_compressed(folder)

    @pytest.mark.parametrize("changed", [{"weights": "int8"}, {"group_size": 31}, {"group_size": None}])
    def test_another_quantization_than_that_of_the_weights(self, folder, changed):
        edit(folder, lambda manifest: manifest["quantization"].update(changed))
        with pytest.raises(ValueError, match=r"model\.safetensors does not fit this VisionTransformer: .* differ"):
            facts.load_compressed(folder)

    def test_none_at_all(self, folder):
        edit(folder, lambda manifest: manifest.update(quantization=None))
        with pytest.raises(ValueError, match=r"parametrizations\.weight.* is unexpected"):
            facts.load_compressed(folder)

    def test_a_weight_that_the_manifest_does_not_name(self, folder):
        edit(folder, lambda manifest: manifest["quantization"]["tensors"].remove(NAME))
        with pytest.raises(ValueError, match=r"model\.safetensors does not fit this VisionTransformer: 3 tensors"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize(
        ("name", "change", "fault"),
        [
            (STORED, torch.Tensor.char, r"original: I8 instead of torch\.uint8"),
            (STORED, torch.Tensor.long, r"original: I64 instead of torch\.uint8"),
            (STORED, torch.Tensor.float, r"original: F32 instead of torch\.uint8"),
            (STORED, lambda stored: stored[:, 1:].contiguous(), r"original: \(144, 23\) instead of \(144, 24\)"),
            (SCALES, torch.Tensor.int, r"scales: I32 instead of torch\.float32"),
            (SCALES, lambda scales: scales[:1].clone(), r"scales: \(1, 2\) instead of \(144, 2\)"),
        ],
    )
    def test_tensors_of_another_type_or_shape(self, folder, name, change, fault):
        replace_tensor(folder, name, change)
        with pytest.raises(ValueError, match=rf"model\.safetensors does not fit this VisionTransformer: .*{fault}"):
            facts.load_compressed(folder)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
    def test_scales_that_give_no_numbers(self, folder, value):
        replace_tensor(folder, SCALES, lambda scales: scales.fill_(value))
        with pytest.raises(ValueError, match=r"model\.safetensors: blocks\.0\.attn\.qkv\.weight holds NaN or infinity"):
            facts.load_compressed(folder)

    def test_groups_beyond_any_row(self, folder):
        """They take no memory: a group is no longer than a row."""
        edit(folder, lambda manifest: manifest["quantization"].update(group_size=10**30))
        with pytest.raises(ValueError, match=r"model\.safetensors does not fit this VisionTransformer"):
            facts.load_compressed(folder)

    def test_damage_is_seen(self, folder):
        assert (folder / MANIFEST).is_file()
        edit(folder, lambda manifest: manifest["quantization"].pop("tensors"))
        with pytest.raises(ValueError, match=r"compression\.json is damaged \(quantization\.tensors: Field required\)"):
            facts.load_compressed(folder)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_its_own_methods_save_what_is_quantized(tmp_path, weights):
    """In int4 pivoted layers become two factors: the plan that is saved is the new one."""
    quantized = facts.quantize(compressed(*from_recipe(), form="pivoted"), weights)
    quantized.model.save_pretrained(tmp_path)
    loaded = facts.load_compressed(tmp_path)
    assert loaded.plan == quantized.plan and quantization_of(loaded.model) == quantization_of(quantized.model)
    images = torch.randn(2, 3, 32, 32)
    assert loaded.model(images).equal(quantized.model(images))
