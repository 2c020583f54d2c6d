"""Folders of quantized networks: small, and the same outputs again."""

import pytest
from torch import nn

import facts
from facts.cli.inspect import shapes
from facts.saving.manifest import WEIGHTS, Manifest
from tests.saving.setting import assert_same, compressed, from_recipe, from_timm

pytest.importorskip("torchao", reason="the extra `quantization` is not installed: pip install -e '.[quantization]'")


@pytest.mark.parametrize(
    ("build", "weights", "form"),
    [(from_recipe, "int8", "pivoted"), (from_recipe, "int4", None), (from_timm, "int4", "plain")],
)
def test_outputs_and_shapes_come_back(build, weights, form, tmp_path):
    model, shape = build()
    result = facts.quantize(compressed(model, shape, form=form) if form else model, weights)
    facts.save_compressed(result, tmp_path)
    assert_same(facts.load_compressed(tmp_path), result, shape)
    found = shapes(tmp_path / WEIGHTS, Manifest.read(tmp_path))
    assert found.keys() == result.plan.keys()
    for name, sizes in found.items():  # of four bits, two are in a byte: an odd size looks like the next
        layer = model.get_submodule(name)
        exact = layer.out_features, layer.in_features
        assert sizes == (exact if weights == "int8" else tuple(size + size % 2 for size in exact))


def test_a_network_of_your_own_with_its_card_and_summary(tmp_path):
    network = nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 5))
    dense = sum(parameter.nbytes for parameter in network.parameters())
    result = facts.quantize(network, "int4", group_size=7)
    facts.save_compressed(result, tmp_path)
    loaded = facts.load_compressed(tmp_path, model=network)
    assert (tmp_path / WEIGHTS).stat().st_size < dense
    assert_same(loaded, result, (24,))
    fact, card = "2 weights in int4, one scale for groups of 7", (tmp_path / "README.md").read_text()
    assert f"quantized: {fact}" in repr(loaded) and f"- quantization: {fact}\n" in card and "method" not in card
