"""Exported files of quantized networks on CPU runtimes."""

from importlib.util import find_spec

import numpy as np
import onnx
import pytest
import torch

import facts
from facts.modules.pivoted import PivotedLinear
from facts.saving.openvino_ir import openvino_call
from tests.saving.setting import compressed, from_recipe

# Imported by a skip, OpenVINO would write an identifier of this machine into the home folder.
is_missing = pytest.mark.skipif(find_spec("openvino") is None, reason="the extra `openvino` is not installed")
pytestmark = [pytest.mark.system, is_missing]

pytest.importorskip("torchao", reason="the extra `quantization` is not installed: pip install -e '.[quantization]'")


def test_openvino_gives_the_same_outputs(tmp_path):
    model, shape = from_recipe()
    quantized = facts.quantize(compressed(model, shape), "int4")
    file, images = tmp_path / "model.onnx", torch.randn(4, *shape)
    facts.export_onnx(quantized, images[:1], file)
    outputs = openvino_call(file)(images)
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
