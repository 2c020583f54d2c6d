"""Exported files of quantized networks on CPU runtimes."""

import numpy as np
import onnx
import pytest
import torch

import facts
from facts.modules.pivoted import PivotedLinear
from tests.openvino_runtime import compiled
from tests.saving.setting import compressed, from_recipe

pytestmark = pytest.mark.system

pytest.importorskip("openvino", reason="the extra `openvino` is not installed: pip install -e '.[openvino]'")
pytest.importorskip("torchao", reason="the extra `quantization` is not installed: pip install -e '.[quantization]'")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_openvino_gives_the_same_outputs(weights, tmp_path):
    model, shape = from_recipe()
    quantized = facts.quantize(compressed(model, shape), weights)
    file, images = tmp_path / "model.onnx", torch.randn(4, *shape)
    facts.export_onnx(quantized, images[:1], file)
    outputs = torch.from_numpy(next(iter(compiled(file, 1)(images.numpy()).values())))
    with torch.no_grad():
        expected = quantized.model.eval()(images)
    assert (outputs - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_integers_stay_integers_and_scattered_pivots_take_any_batch_size(tmp_path):
    """But PyTorch's exporter multiplies small ones by their scales."""
    result = facts.quantize(torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 100)))
    facts.export_onnx(result, torch.randn(1, 100), tmp_path / "model.onnx")
    tensors = onnx.load(tmp_path / "model.onnx").graph.initializer
    assert [tensor.data_type for tensor in tensors if np.prod(tensor.dims) == 20_000] == [onnx.TensorProto.INT8] * 2
    model = torch.nn.Sequential(PivotedLinear.empty(torch.nn.Linear(12, 9), 4, "scattered columns"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    facts.export_onnx(model, torch.randn(2, 5, 12), tmp_path / "model.onnx")  # compares its outputs
