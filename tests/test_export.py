"""Exported files give the network's outputs, hold its low-rank factors and nothing else, or are not written."""

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import facts
from experiments.train_mini import mini_recipe
from tests.disk import room_for
from tests.networks import make_model

# Every kind of block once: what else the networks hold are more of the same.
DEPTHS = {
    "deit_b": {"depth": 1},
    "swin_b": {"depths": [2], "num_heads": [2]},
    "convnext_b": {"depths": [1, 1, 1, 1]},
    "mambavision_b": {"depths": [0, 0, 2, 0]},
}
DIFFERENT = "gives other outputs than the network: .* nothing was written"


def run_onnx(path, batch):
    return torch.from_numpy(onnxruntime.InferenceSession(path).run(["output"], {"input": batch.numpy()})[0])


def run_program(path, batch):
    return torch.export.load(path).module()(batch)


EXPORTS = {"onnx": (facts.export_onnx, run_onnx), "pt2": (facts.export_program, run_program)}


def assert_same(path, model, shape):
    run = EXPORTS[path.suffix[1:]][1]
    for size in (1, 4):
        batch = torch.randn(size, *shape)
        with torch.no_grad():
            expected = model.eval()(batch)
        assert (run(path, batch) - expected).abs().max() <= 1e-4 * expected.abs().max()


def perceptron():
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 28), nn.Tanh(), nn.Linear(28, 12))


@pytest.fixture(params=EXPORTS)
def exported(request, tmp_path):
    """A kind of file, its export function, and a path for it in an empty folder."""
    return EXPORTS[request.param][0], tmp_path / "files" / f"model.{request.param}"


@pytest.mark.parametrize("name", DEPTHS)
def test_the_four_families(name, tmp_path):
    recipe = mini_recipe(name)
    model = mini_recipe(name, weights="random", arguments={**recipe.arguments, **DEPTHS[name]}).build()
    shape = model.pretrained_cfg["input_size"]
    result = facts.compress(model, estimator="pela", input_shape=shape)
    for kind, (export, _) in EXPORTS.items():
        export(result, torch.randn(2, *shape), tmp_path / f"model.{kind}")
        assert_same(tmp_path / f"model.{kind}", result.model, shape)


def test_layers_are_two_products_in_the_file(tmp_path):
    model = perceptron()
    result = facts.compress(model, estimator="pela")
    for network, name in ((model, "dense"), (result, "small")):
        facts.export_onnx(network, torch.randn(1, 24), tmp_path / f"{name}.onnx")
        facts.export_program(network, torch.randn(1, 24), tmp_path / f"{name}.pt2")
    graph = onnx.load(tmp_path / "small.onnx").graph
    products = [node for node in graph.node if node.op_type in ("Gemm", "MatMul")]
    weights = [set(weight.dims) for weight in graph.initializer if len(weight.dims) == 2]
    expected = []
    for layer, rank in result.plan.items():
        dense = model.get_submodule(layer)
        expected += [{rank, dense.in_features}, {rank, dense.out_features}]
    assert len(products) == len(weights) == len(expected)
    assert all(shape in weights for shape in expected)
    state = torch.export.load(tmp_path / "small.pt2").state_dict
    assert {name: t.shape for name, t in state.items()} == {n: t.shape for n, t in result.model.state_dict().items()}


def test_files_are_smaller_than_those_of_the_dense_network(exported):
    export, path = exported
    model = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 200))
    result = facts.compress(model, estimator="pela")
    dense = path.with_stem("dense")
    export(model, torch.randn(1, 200), dense)
    export(result, torch.randn(1, 200), path)
    assert path.stat().st_size < 0.6 * dense.stat().st_size


def test_a_loaded_network_exports_the_same(exported):
    export, path = exported
    result = facts.compress(perceptron(), estimator="pela")
    facts.save_compressed(result, path.parent / "saved")
    export(facts.load_compressed(path.parent / "saved", model=perceptron()), torch.randn(3, 24), path)
    assert_same(path, result.model, (24,))


def test_the_network_stays_as_it_was(exported):
    """The file is that of evaluation mode all the same."""
    export, path = exported
    model = nn.Sequential(nn.Linear(24, 12), nn.Dropout()).train()
    export(model, torch.randn(2, 24), path)
    assert all(module.training for module in model.modules())
    assert_same(path, model, (24,))


def test_files_hold_no_data_and_name_no_source_file(exported):
    export, path = exported
    example = torch.full((1, 24), 0.12345)
    export(facts.compress(perceptron(), estimator="pela"), example, path)
    written = path.read_bytes()
    assert __file__.encode() not in written and b"facts/lowrank.py" not in written
    assert example[0, :2].numpy().tobytes() not in written


def test_weights_beyond_a_file_lie_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 0)
    path = tmp_path / "model.onnx"
    for _ in range(2):  # the second over the first
        model = perceptron()
        facts.export_onnx(model, torch.randn(1, 24), path)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
        assert_same(path, model, (24,))


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Pair(nn.Module):
    def forward(self, x):
        return x + 1, x + 2


@pytest.mark.parametrize(
    ("model", "message"), [(Noisy(), DIFFERENT), (Pair(), "Pair gives a tuple, and only what gives one tensor")]
)
def test_what_cannot_be_exported_leaves_the_folder_as_it_was(exported, model, message):
    export, path = exported
    path.parent.mkdir()
    path.write_text("before")
    with pytest.raises(ValueError, match=message):
        export(model, torch.randn(2, 24), path)
    assert [file.name for file in path.parent.iterdir()] == [path.name] and path.read_text() == "before"


@pytest.mark.parametrize("example", ["images", [torch.ones(2, 24)], torch.ones(0, 24), torch.tensor(1.0)])
def test_an_example_that_is_no_batch(exported, example):
    export, path = exported
    with pytest.raises(ValueError, match=r"must be a batch of at least one input, as one tensor \[N, ...\], got a"):
        export(perceptron(), example, path)


def test_only_float32_becomes_onnx(tmp_path):
    with pytest.raises(ValueError, match=r"written in float32, and the network is in torch\.float64: export `model"):
        facts.export_onnx(make_model(), torch.randn(2, 3, 8, 8), tmp_path / "model.onnx")
    path = tmp_path / "model.pt2"
    example = torch.randn(2, 24, dtype=torch.bfloat16)
    facts.export_program(perceptron().bfloat16(), example, path)
    assert run_program(path, example).dtype == torch.bfloat16


def test_a_folder_that_cannot_be_written(exported):
    export, path = exported
    path.parent.write_text("")
    with pytest.raises(OSError, match="cannot write to the folder"):
        export(perceptron(), torch.randn(2, 24), path)


def test_a_disk_that_fills_up(exported):
    export, path = exported
    with room_for(4096), pytest.raises(OSError, match=r"no room for .*model\..*: free some"):
        export(perceptron(), torch.randn(2, 24), path)
    assert list(path.parent.iterdir()) == []


def test_without_onnx_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("facts.export.find_spec", lambda name: None if name == "onnx" else name)
    with pytest.raises(ModuleNotFoundError, match=r"ONNX export needs onnx: pip install 'facts\[export\]'"):
        facts.export_onnx(perceptron(), torch.randn(2, 24), tmp_path / "model.onnx")
