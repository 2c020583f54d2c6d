"""OpenVINO's files: the same outputs in float32, near ones in int8."""

import sys
from importlib.util import find_spec

import pytest
import torch

import facts
from facts.saving.export import openvino_call
from tests.networks import image_batches, make_vit
from tests.saving.setting import from_recipe

# Imported by a skip, NNCF would write an identifier of this machine into the home folder.
pytestmark = pytest.mark.skipif(find_spec("nncf") is None, reason="the extra `openvino` is not installed")


@pytest.mark.system
def test_float32_has_the_networks_outputs_and_int8_near_ones(tmp_path):
    model, shape = from_recipe()
    images, data = torch.randn(5, *shape), image_batches([8, 8], shape=shape, dtype=torch.float32)
    assert facts.export_openvino(model, images[:1], tmp_path / "exact.xml") == 0
    with torch.no_grad():
        expected = model.eval()(images)
    torch.testing.assert_close(openvino_call(tmp_path / "exact.xml")(images), expected, rtol=1e-4, atol=1e-5)
    error = facts.export_openvino(model, images[:1], tmp_path / "small.xml", int8=data)
    samples = torch.cat([inputs for inputs, _ in data])
    with torch.no_grad():
        original, changed = model(samples), openvino_call(tmp_path / "small.xml")(samples)
    assert error == pytest.approx(((changed - original).norm() / original.norm()).square().item(), rel=1e-3)
    assert 0 < error < 0.05
    assert (tmp_path / "small.bin").stat().st_size < 0.5 * (tmp_path / "exact.bin").stat().st_size


def test_what_cannot_be_exported_is_told_before_any_work(tmp_path, monkeypatch):
    model, example, out = make_vit().float(), torch.randn(1, 3, 16, 16), tmp_path / "vit.xml"
    with pytest.raises(ValueError, match=r"name the \.xml, not vit\.onnx"):
        facts.export_openvino(model, example, tmp_path / "vit.onnx")
    with pytest.raises(ValueError, match=r"has the shape \[3, 8, 8\], but the example has \[3, 16, 16\]"):
        facts.export_openvino(model, example, out, int8=[torch.randn(4, 3, 16, 16), torch.randn(4, 3, 8, 8)])
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(ModuleNotFoundError, match=r"OpenVINO export needs nncf: pip install -e '.\[openvino\]'"):
        facts.export_openvino(model, example, out, int8=[example])
    assert not list(tmp_path.iterdir())
