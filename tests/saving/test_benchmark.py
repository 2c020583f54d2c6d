"""Networks timed in the runtimes of this machine: each computes the network; how fast any is, is not tested."""

from importlib.util import find_spec

import pytest
import torch

import facts
from facts.cost.timing import TimingPolicy
from facts.saving import export
from tests.networks import make_causal_lm, make_vit

CPU, QUICK = torch.device("cpu"), TimingPolicy(num_warmups=1, num_turns=2, min_seconds=0)
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.system
def test_each_runtime_computes_the_network(tmp_path, monkeypatch):
    """In float32 to rounding; in bfloat16 and int8 to their own."""
    network, outputs = make_vit().float(), {}
    load = export._load

    def recorded(model, runtime, *arguments):
        call = load(model, runtime, *arguments)
        outputs[runtime] = call(IMAGES)
        return call

    monkeypatch.setattr(export, "_load", recorded)
    chosen = [name for name in export.runtimes_of(CPU, int8=True) if "compiled" not in name]
    found = facts.benchmark({"own": network}, IMAGES, runtimes=chosen, int8=[IMAGES], timing=QUICK)
    assert [each.runtime for each in found] == chosen and all(each.network == "own" for each in found)
    assert min(min(each.throughput, each.latency) for each in found) > 0
    with torch.no_grad():
        expected = network.eval()(IMAGES)
    for runtime, output in outputs.items():
        tolerance = 1e-4 if "float32" in runtime else 0.05
        assert (output.float() - expected).norm() < tolerance * expected.norm(), runtime


def test_runtimes_are_those_of_the_device_and_of_what_is_installed(monkeypatch):
    assert export.runtimes_of(torch.device("cuda"))[-1] == "PyTorch fused, float16"
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "openvino" else find_spec(name))
    assert export.runtimes_of(CPU, int8=True)[4:] == ["ONNX Runtime, float32", "ONNX Runtime, int8"]
    with pytest.raises(ValueError, match="no runtime 'OpenVINO, float32' here: choose from PyTorch, float32; PyTorch"):
        facts.benchmark({"own": make_vit()}, IMAGES, runtimes=["OpenVINO, float32"])
    with pytest.raises(ValueError, match="no runtime 'ONNX Runtime, float32' here"):
        facts.benchmark({"texts": make_causal_lm()}, torch.zeros(2, 8).long(), runtimes=["ONNX Runtime, float32"])


@pytest.mark.system
def test_compilers_compute_the_network():
    """Seen on a CPU, where neither CUDA graphs nor kernels of Triton run."""
    network = facts.compress(make_vit().float(), [IMAGES], estimator="pela", search="uniform", form="plain").model
    calls = (export._in_pytorch(network, torch.float32, each) for each in export.COMPILERS.values())
    expected, *found = [call(IMAGES) for call in calls]
    for outputs in found:
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
