"""Exported files, and runtimes, give the network's outputs; files hold its factors alone, or are not written."""

import copy
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import facts
from experiments.mini.train import mini_recipe
from facts.cost.timing import TimingPolicy
from facts.modules.forms import Pivoted
from facts.saving import export as exporting
from facts.saving.export import openvino_call
from facts.saving.manifest import LOADER
from tests.disk import room_for
from tests.networks import make_causal_lm, make_image_classifier, make_model, make_vit, relative_error
from tests.refusals import refuses
from tests.saving.setting import UNIT_BATCHES, compressed_units
from tests.toys import Net

pytestmark = pytest.mark.system

# Every kind of block once, for time.
SHORT = {"swin_b": {"depths": [2], "num_heads": [2]}, "convnext_b": {"depths": [1, 1, 1, 1]}}
SHORT |= {"mambavision_b": {"depths": [0, 0, 2, 0], "windows": [2, 2]}}
EXAMPLE, UNIT_IMAGES = torch.full((1, 24), 0.12345), UNIT_BATCHES[0][0]
EXPORTS = {"onnx": facts.export_onnx, "pt2": facts.export_program}
CPU, QUICK = torch.device("cpu"), TimingPolicy(num_warmups=1, num_turns=2, min_seconds=0)
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
NOISY, PAIR = Net(lambda net, x: x + torch.randn_like(x)), Net(lambda net, x: (x + 1, x + 2))
BRANCHING = Net(lambda net, x: x if x.sum() > 0 else -x)
# Imported by a skip, NNCF would write an identifier of this machine into the home folder.
by_openvino = pytest.mark.skipif(find_spec("nncf") is None, reason="the extra `openvino` is not installed")
INT8 = [  # what is larger than the bounds on size and error would be no int8
    (facts.export_onnx, "onnx", "onnx.data", 0.35, 0.01),
    pytest.param(facts.export_openvino, "xml", "bin", 0.5, 0.05, marks=by_openvino),
]


def run(path, batch):
    if path.suffix != ".onnx":
        return (openvino_call(path) if path.suffix == ".xml" else torch.export.load(path).module())(batch)
    import onnxruntime  # here, for it takes a second

    return torch.from_numpy(onnxruntime.InferenceSession(path).run(["output"], {"input": batch.numpy()})[0])


def assert_exported(network, example, folder, model):
    """By both exporters; the files compute what `model` does, for batches of any size."""
    for kind, export in EXPORTS.items():
        export(network, example, path := folder / f"model.{kind}")
        for size in (1, 4):
            expected = model(batch := torch.randn(size, *example.shape[1:]))
            assert (run(path, batch) - expected).abs().max() <= 1e-4 * expected.abs().max()


def perceptron():
    layers = nn.Linear(24, 400), nn.Dropout(), nn.Tanh(), nn.Linear(400, 280), nn.Tanh(), nn.Linear(280, 12)
    return nn.Sequential(*layers)


@pytest.mark.parametrize(("name", "form"), [*zip(SHORT, ("plain", "pivoted", "pivoted"), strict=True)])
def test_the_families(name, form, tmp_path):
    model = mini_recipe(name, weights="random", arguments=mini_recipe(name).arguments | SHORT[name]).build()
    shape = model.pretrained_cfg["input_size"]
    result = facts.compress(facts.prepare(model, input_shape=shape), estimator="pela", form=form)
    assert_exported(result, torch.randn(2, *shape), tmp_path, result.model)


def test_a_loaded_network_exports_its_factors_and_nothing_else(tmp_path):
    """Also in training mode, in which it stays."""
    facts.save_compressed(facts.compress(perceptron(), estimator="pela", form="plain"), tmp_path / "saved")
    result = facts.load_compressed(tmp_path / "saved", model=perceptron())
    evaluated = copy.deepcopy(result.model)
    result.model.train()
    assert_exported(result, EXAMPLE, tmp_path, evaluated)
    assert all(module.training for module in result.model.modules())
    onnx, program = (tmp_path / f"model.{kind}" for kind in EXPORTS)
    for file in (onnx, program):
        assert file.stat().st_size < 0.7 * sum(parameter.nbytes for parameter in perceptron().parameters())
        written = file.read_bytes()
        assert EXAMPLE[0, :2].numpy().tobytes() not in written and b".py" not in written  # no data, no source file
    state = torch.export.load(program).state_dict
    assert state.keys() == evaluated.state_dict().keys()
    assert all(tensor.equal(state[name]) for name, tensor in evaluated.state_dict().items())
    graph = pytest.importorskip("onnx").load(onnx).graph
    assert len([node for node in graph.node if node.op_type in ("Gemm", "MatMul")]) == 2 * len(result.plan)
    weights = [sorted(weight.dims) for weight in graph.initializer if len(weight.dims) == 2]
    layers = [evaluated.get_submodule(name) for name in result.plan]
    assert sorted(weights) == sorted(sorted(factor.shape) for each in layers for factor in (each.left, each.right))


WITHOUT_FACTS = f"""
import sys, pathlib, timm, torch
sys.modules["facts"] = None  # importing it raises an error
*folders, images, outputs = sys.argv[1:]
images = torch.load(images)
def run(folder):
    exec(pathlib.Path(folder, "{LOADER}").read_text(), names := {{}})
    network = names["load"](folder)
    return network(images.to(next(network.parameters()).dtype))
with torch.no_grad():
    found = [*map(run, folders)]
    timm.layers.set_fused_attn(False)  # by timm's own scale of the scores
    torch.save([found, [*map(run, folders)]], outputs)
"""


def test_units_are_exported_and_the_text_in_their_folder_loads_them_without_facts(units, tmp_path):
    """Merged tokens too; a network in half precision is computed in it."""
    assert_exported(units, UNIT_IMAGES[:2], tmp_path, units.model)
    merged = compressed_units("cors_fisher", "units,tokens")
    assert any(count for name, count in merged.plan.items() if name.endswith("tokens"))
    results = {"units": (units, {}), "half": (units, {"dtype": torch.bfloat16}), "merged": (merged, {})}
    for name, (result, options) in results.items():
        facts.save_compressed(result, tmp_path / name, **options)
    torch.save(UNIT_IMAGES, tmp_path / "images")
    paths = [tmp_path / name for name in (*results, "images", "outputs")]
    subprocess.run([sys.executable, "-I", "-c", WITHOUT_FACTS, *paths], check=True, cwd=tmp_path)
    (outputs, in_half, of_merged), not_fused = torch.load(paths[-1])
    assert outputs.equal(units.model(UNIT_IMAGES))
    assert in_half.equal(facts.load_compressed(tmp_path / "half").model(UNIT_IMAGES.bfloat16()))
    torch.testing.assert_close(not_fused[0], outputs)
    for found in (of_merged, not_fused[-1]):
        torch.testing.assert_close(found, merged.model(UNIT_IMAGES), rtol=1e-4, atol=1e-5)


def test_scattered_pivots_take_any_batch_size(tmp_path):
    model = nn.Sequential(Pivoted(layout="scattered columns").empty(nn.Linear(12, 9), 4))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    facts.export_onnx(model, torch.randn(2, 5, 12), tmp_path / "model.onnx")  # compares its outputs


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize(
    "end", [lambda x: x.masked_fill(torch.arange(12) == 1, -torch.inf), lambda x: x > 0, lambda x: x[:, :0]]
)
def test_outputs_that_are_infinite_boolean_or_none_within_autocast(end, kind, tmp_path):
    model = perceptron().eval()
    model.register_forward_hook(lambda module, args, output: end(output))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        EXPORTS[kind](model, EXAMPLE, path := tmp_path / f"model.{kind}")
    torch.testing.assert_close(run(path, EXAMPLE), model(EXAMPLE), rtol=1e-4, atol=1e-5)


def test_networks_of_transformers_return_their_logits(tmp_path):
    model = make_image_classifier("swin")
    images = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.int64)}
    assert_exported(model, example := images["pixel_values"][:1], tmp_path, lambda batch: model(batch).logits)
    path, without = tmp_path / "model.onnx", type(model.base_model)(model.config, add_pooling_layer=False)
    assert facts.export_onnx(model, example, path, int8=[images]) > 0
    refuses("has neither logits nor pooler_output: wrap it in a module", facts.export_onnx, without, example, path)


@pytest.mark.parametrize("kind", EXPORTS)
def test_refusals_leave_the_folder_as_it_was(kind, tmp_path):
    export, path = EXPORTS[kind], tmp_path / f"model.{kind}"
    path.write_text("before")
    refuses(r"differ from the network's by up to .* nothing was written", export, NOISY, EXAMPLE, path)
    with pytest.raises(ValueError, match="Net returns a tuple, but only a network that returns one tensor can be"):
        facts.export_program(PAIR, EXAMPLE, tmp_path / "pair.pt2")
    for network, example in ((perceptron(), torch.ones(2, 3)), (BRANCHING, torch.ones(2, 3))):
        refuses(r"cannot be exported for batches like the example, float32 \[2, 3\] \(", export, network, example, path)
    for other in (tmp_path, tmp_path / "network.engine"):
        refuses(rf"{other.name} must end in \.{kind}", export, perceptron(), EXAMPLE, other)
    refuses("Net returns a tuple", facts.export_onnx, PAIR, EXAMPLE, tmp_path / "model.onnx", int8=[EXAMPLE])
    for data, message in (
        ([], "the int8 calibration data is empty"),
        (EXAMPLE.double(), r"to calibrate int8 on is float64 \[1, 24\], but the example's are"),
        (EXAMPLE * torch.nan, "to calibrate int8 on has NaN or infinity"),
    ):
        refuses(message, facts.export_onnx, perceptron(), EXAMPLE, tmp_path / "model.onnx", int8=data)
    with room_for(4096):
        refuses(r"no room for .*model\..*: free some", export, perceptron(), EXAMPLE, path, raised=OSError)
    message = r"must be a batch of at least one input, as one tensor \[N, ...\], got"
    for example in ("images", [torch.ones(2, 24)], torch.ones(0, 24), torch.tensor(1.0)):
        refuses(message, export, perceptron(), example, path)
    refuses("the example holds NaN, so outputs", export, perceptron(), EXAMPLE * torch.nan, path)
    assert [file.name for file in path.parent.iterdir()] == [path.name] and path.read_text() == "before"
    refuses("cannot write to the folder", export, perceptron(), EXAMPLE, path / f"within.{kind}", raised=OSError)


def test_only_float32_becomes_onnx(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"written in float32, and the network is in torch\.float64: use `model"):
        facts.export_onnx(make_model(), torch.randn(2, 3, 8, 8), tmp_path / "model.onnx")
    example = torch.randn(2, 24, dtype=torch.bfloat16)
    facts.export_program(perceptron().bfloat16(), example, tmp_path / "model.pt2")
    assert run(tmp_path / "model.pt2", example).dtype == torch.bfloat16
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModuleNotFoundError, match=r"ONNX export needs onnx: pip install -e '.\[export\]'"):
        facts.export_onnx(perceptron(), EXAMPLE, tmp_path / "model.onnx")


@pytest.mark.parametrize(("export", "kind", "beside", "size", "far"), INT8)
def test_float32_is_exact_and_int8_smaller_and_near(export, kind, beside, size, far, tmp_path, monkeypatch):
    """Large weights lie beside the graph."""
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 0)
    model, data = perceptron().eval(), [(torch.randn(8, 24), torch.zeros(8).long()) for _ in range(6)]
    assert export(model, EXAMPLE, tmp_path / f"exact.{kind}") == 0
    original = model(samples := torch.cat([inputs for inputs, _ in data])[:32])
    torch.testing.assert_close(run(tmp_path / f"exact.{kind}", samples), original, rtol=1e-4, atol=1e-5)
    error = export(model, EXAMPLE, tmp_path / f"small.{kind}", int8=data)
    changed = run(tmp_path / f"small.{kind}", samples)
    assert error == pytest.approx(relative_error(changed, original) ** 2, rel=1e-3) and 0 < error < far
    assert {file.name for file in tmp_path.glob("exact*")} == {f"exact.{kind}", f"exact.{beside}"}
    sizes = [sum(file.stat().st_size for file in tmp_path.glob(f"{name}*")) for name in ("small", "exact")]
    assert sizes[0] < size * sizes[1]


def test_layers_whose_inputs_have_outliers_stay_in_float32(tmp_path):
    """One of 2,048 hidden values is a thousand times as large as the others: 255 steps would leave nothing of those."""
    model = nn.Sequential(nn.Linear(24, 2048), nn.Linear(2048, 8)).eval()
    with torch.no_grad():
        model[0].weight[0] *= 1000
        model[1].weight[:, 0] = 0
    assert 0 < facts.export_onnx(model, EXAMPLE, tmp_path / "model.onnx", int8=[torch.randn(64, 24)]) < 1e-3


@by_openvino
def test_what_cannot_be_exported_is_told_before_any_work(tmp_path, monkeypatch):
    model, example, out = make_vit().float(), torch.randn(1, 3, 16, 16), tmp_path / "vit.xml"
    refuses(r"vit\.onnx must end in \.xml", facts.export_openvino, model, example, tmp_path / "vit.onnx")
    with pytest.raises(ValueError, match=r"is float32 \[1, 3, 8, 8\], but the example.s are float32 \[1, 3, 16, 16\]"):
        facts.export_openvino(model, example, out, int8=[torch.randn(4, 3, 16, 16), torch.randn(4, 3, 8, 8)])
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(ModuleNotFoundError, match=r"OpenVINO export needs nncf: pip install -e '.\[openvino\]'"):
        facts.export_openvino(model, example, out, int8=[example])
    assert not list(tmp_path.iterdir())


def test_each_runtime_computes_the_network(tmp_path, monkeypatch):
    """In float32 to rounding; in bfloat16 and int8 to their own."""
    network, outputs = make_vit().float(), {}
    load = exporting.loaded

    def recorded(model, runtime, *arguments):
        call = load(model, runtime, *arguments)
        outputs[runtime] = call(IMAGES)
        return call

    monkeypatch.setattr(exporting, "loaded", recorded)
    chosen = [name for name in exporting.runtimes_of(CPU, int8=True) if "compiled" not in name]
    found = facts.benchmark({"own": network}, IMAGES, runtimes=chosen * 2, int8=[IMAGES], timing=QUICK)
    assert [each.runtime for each in found] == chosen and all(each.network == "own" for each in found)
    assert min(min(each.throughput, each.latency) for each in found) > 0
    expected = network.eval()(IMAGES)
    for runtime, output in outputs.items():
        tolerance = 1e-4 if "float32" in runtime else 0.05
        assert (output.float() - expected).norm() < tolerance * expected.norm(), runtime


def test_runtimes_are_those_of_the_device_and_of_what_is_installed(monkeypatch):
    assert exporting.runtimes_of(torch.device("cuda"))[-1] == "PyTorch fused, float16"
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "openvino" else find_spec(name))
    assert exporting.runtimes_of(CPU, int8=True)[4:] == ["ONNX Runtime, float32", "ONNX Runtime, int8"]
    with pytest.raises(ValueError, match="no runtime 'OpenVINO, float32' here: choose from PyTorch, float32; PyTorch"):
        facts.benchmark({"own": make_vit()}, IMAGES, runtimes=["OpenVINO, float32"])
    with pytest.raises(ValueError, match="no runtime 'ONNX Runtime, float32' here"):
        facts.benchmark({"texts": make_causal_lm()}, torch.zeros(2, 8).long(), runtimes=["ONNX Runtime, float32"])
