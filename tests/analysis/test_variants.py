import pytest
import torch

import facts
from facts.analysis.variants import VARIANTS
from facts.calibration.selection import select_layers
from facts.cost.count import count_params
from facts.cost.speed import speeds
from facts.cost.timing import TimingPolicy
from facts.modules.lowrank import LowRankLinear
from tests.networks import UNIFORM, image_batches

QUICK = TimingPolicy(num_turns=2, min_seconds=0)
types = []


def note_types(module, args, output):
    types.extend((args[0].dtype, output.dtype))


@pytest.fixture
def compressed(model):
    return facts.compress(facts.prepare(model, input_shape=(3, 8, 8)), estimator="pela", ratio=0.5, **UNIFORM).model


def test_residuals_stand_beside_low_rank_layers_and_take_five_percent(model, compressed):
    layers = select_layers(model).layers
    network = VARIANTS["residual"](model, compressed, layers)
    images = image_batches([2])[0][0]
    assert network(images).isfinite().all() and not torch.equal(network(images), compressed(images))
    added = count_params(network) - count_params(compressed)
    ranks = {
        name: max(1, int(0.05 * (layer.weight.numel() // sum(layer.weight.shape)))) for name, layer in layers.items()
    }
    low_rank = [name for name in layers if isinstance(compressed.get_submodule(name), LowRankLinear)]
    assert added == sum(ranks[name] * sum(layers[name].weight.shape) for name in low_rank)
    assert low_rank and not any("residual" in name for name, _ in compressed.named_modules())


def test_semi_structured_sparsity_needs_a_gpu_that_has_it(model, compressed):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(NotImplementedError, match="compute capability"):
        VARIANTS["two_of_four"](model, compressed, select_layers(model).layers)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_network_in_half_precision_gets_its_inputs_in_it(model, compressed, precision):
    model = model.float()
    types.clear()
    half = VARIANTS["half"](model, compressed, {})
    half.vector.register_forward_hook(note_types)
    found = speeds({"dense": model, "half": half}, image_batches([4])[0][0].float(), QUICK, precision)
    assert found["half"].throughput > 0 and set(types) == {torch.float16}
    assert next(model.parameters()).dtype == torch.float32


def test_a_network_in_a_format_that_no_file_holds_is_timed_without_a_file(model):
    class Own(torch.Tensor):
        pass

    model.vector.weight = torch.nn.Parameter(model.vector.weight.detach().as_subclass(Own))
    found = speeds({"own": model}, image_batches([4])[0][0], QUICK)["own"]
    assert found.throughput > 0 and found.load is None and found.memory is None


@pytest.mark.parametrize("compiled", [False, True])
def test_speeds_of_networks(model, compressed, compiled, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda network, dynamic: network)  # tested elsewhere, and slow
    model.train()
    found = speeds({"a": model, "b": compressed}, image_batches([4])[0][0], QUICK, compiled=compiled)
    assert list(found) == ["a", "b"]
    for speed in found.values():
        assert (
            speed.throughput > 0 and speed.latency > 0 and speed.load > 0 and speed.spread >= 0 and speed.memory is None
        )
    assert model.training
