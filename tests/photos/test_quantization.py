"""Two published networks and real photos: low-rank layers, weights of eight and four bits, and both; CPU runtimes.

Writes `results/photos/quantization` in half an hour.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import save_model

import facts
from facts.cost.timing import TimingPolicy
from facts.saving.export import onnx_call
from facts.saving.openvino_ir import openvino_call
from tests.photos.data import NETWORKS, Table, load_all, top1

pytestmark = pytest.mark.external

RATIO, BATCH, TURNS = 0.7, 16, 5
RUNTIMES = ("PyTorch", "ONNX Runtime", "OpenVINO")
COLUMNS = {"network": "", "weights": "", "MB": ".2f", "top1": ".1f", **{f"{name} ms": ".0f" for name in RUNTIMES}}
TEXT = (
    "# Low-rank layers and quantized weights on two published networks\n\n"
    "MB is the size of the file of weights. Top-1 in percent on 650 validation photos (standard error up to 2.0). "
    f"Low-rank: `facts.compress` with its defaults at {RATIO} of the linear layers' FLOPs, on 1,000 other photos; int8 "
    "and int4: `facts.quantize` with its defaults, of the dense or of the low-rank network. Milliseconds for a batch "
    f"of {BATCH} photos on one thread of a CPU that did other work too: all networks and runtimes of a network took "
    f"turns, and the medians of {TURNS} turns are shown: compare within a network. ONNX Runtime and OpenVINO run the "
    "file of `facts.export_onnx`, in float32; but OpenVINO rounds the activations that meet int8 weights to eight bits "
    "too, which is its default and saves time. Top-1 is PyTorch's, without that. Written by "
    "`tests/photos/test_quantization.py`."
)


def runs_of(model, name, images, folder):
    """The network on one batch in each runtime, with torch's number of threads."""
    file = folder / f"{name}.onnx"
    facts.export_onnx(model, images[:1], file)
    return {
        (name, "PyTorch"): partial(torch.inference_mode()(model), images),
        (name, "ONNX Runtime"): partial(onnx_call(file), images),
        (name, "OpenVINO"): partial(openvino_call(file), images),
    }


def test_quantized_networks_are_smaller_and_as_good(tmp_path_factory):
    table = Table("photos/quantization", COLUMNS, TEXT)
    for network in NETWORKS:
        folder, (model, calibration, validation) = tmp_path_factory.mktemp(network), load_all(network)
        low_rank = facts.compress(model, calibration, ratio=RATIO)
        networks = {"dense": model, "low-rank": low_rank.model}
        for name, network_or_result in (("dense", model), ("low-rank", low_rank)):
            for weights in ("int8", "int4"):
                networks[f"{name}, {weights}"] = facts.quantize(network_or_result, weights).model
        runs = {}
        for name, each in networks.items():
            runs |= runs_of(each.eval(), name, validation[0][0][:BATCH], folder)
            save_model(each, str(folder / f"{name}.safetensors"))
        times = TimingPolicy(num_turns=TURNS, min_seconds=0).times(runs)
        for name in sorted(networks):
            size = (folder / f"{name}.safetensors").stat().st_size / 1e6
            milliseconds = [1000 * times[name, runtime].median for runtime in RUNTIMES]
            table.add(network, name, size, top1(networks[name], validation), *milliseconds)
    for _, found in table.frame.groupby("network"):
        accuracy, size = found.set_index("weights").top1, found.set_index("weights").MB
        assert abs(accuracy["dense, int8"] - accuracy["dense"]) < 1
        assert size["low-rank, int8"] < size["dense, int8"] < size["low-rank"]
