"""Estimates: exact where counting is exact, and of the right size where it is not."""

import copy

import pytest
import torch

from experiments.grid import GridCell
from experiments.planning.estimate import estimate
from experiments.planning.network import kept_bytes
from experiments.planning.rates import Rates
from experiments.runner import open_cell
from experiments.workers import share_data_pass
from facts.calibration.selection import select_layers
from facts.cost.trace import trace_network
from facts.estimators import ESTIMATORS
from facts.moments import GroupGradients, InputGram, SampleGradGrams, collect_moments
from facts.moments.memory import MemoryPolicy
from tests.networks import make_causal_lm, make_model


def test_a_network_is_measured_without_its_weights_and_data(cell_config):
    need = estimate([cell_config("profile=paper", "estimator=none")])
    assert 4 * 87.3e6 < need.memory < 12e9  # its parameters, and what one batch leaves
    assert need.disk == need.double == 0
    assert need.passes == 50_000
    assert need.flops == pytest.approx(35e9, rel=0.05)  # 33.9 GFLOPs and attention's products


@pytest.mark.external
@pytest.mark.parametrize("model", ["swin_l", "convnext_l", "mambavision_l"])
def test_the_largest_networks_fit_a_gpu_of_24_gb(cell_config, model):
    """All ten estimators at once, in float32, with batches of 64: half of the memory for moments, parts of batches."""
    configs = [cell_config("profile=paper", f"model={model}", f"estimator={name}") for name in ESTIMATORS]
    need = estimate(configs)
    assert need.memory > 24e9
    assert need.num_parts(24e9, MemoryPolicy()) in (2, 4)
    assert need.num_parts(24e9, MemoryPolicy(moments="device", halve_batches=False)) is None


def test_what_a_pass_keeps_is_counted_without_computing():
    """On the meta device as on the CPU; a layer's input is kept though autograd drops it."""
    model, images = make_model(torch.float32), torch.randn(3, 3, 8, 8)
    layers, skeleton = select_layers(model).layers, copy.deepcopy(model).to("meta")
    kept = kept_bytes(model, layers, images)
    assert kept == kept_bytes(skeleton, select_layers(skeleton).layers, images.to("meta"))
    rows = trace_network(model, layers, images.to("meta")).rows  # of all three images
    assert kept >= sum(4 * rows[name] * layer.in_features for name, layer in layers.items())


def sizes(folder):
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.system
def test_disk_is_what_the_cache_takes(cell_config):
    """Headers of the files aside."""
    names = ("facts", "gfwsvd", "shampoo2", "svd_llm", "pela")
    configs = [cell_config(f"estimator={name}", "task.mini.num_calibration=64") for name in names]
    share_data_pass([GridCell("demo", "row", "column", config) for config in configs])
    cells = [open_cell(config) for config in configs]
    taken = sizes(cells[0].folder / "cache")  # before GFWSVD deletes its gradients
    for cell in cells:
        cells[0].calibration.decompositions(cell.method.needed_estimator)
    taken |= sizes(cells[0].folder / "cache")
    assert estimate([cell.config for cell in cells]).disk == pytest.approx(sum(taken.values()), rel=0.1)


def test_moments_are_counted_once_and_decompositions_by_estimator(cell_config):
    one = estimate([cell_config("estimator=facts")])
    again = estimate([cell_config("estimator=facts"), cell_config("estimator=facts", "ratio=0.4")])
    other = estimate([cell_config("estimator=facts"), cell_config("estimator=kfac_expand")])
    assert again.disk == one.disk < other.disk
    assert again.double == one.double and other.double == 2 * one.double


def test_a_cell_without_the_cache_has_a_data_pass_of_its_own(cell_config):
    overrides = [("ratio=0.5",), ("ratio=0.4",)]
    shared = estimate([cell_config(*each) for each in overrides])
    alone = estimate([cell_config(*each, "cache=false") for each in overrides])
    single = estimate([cell_config("cache=false")])
    assert alone.passes == pytest.approx(2 * single.passes) and alone.passes > shared.passes
    assert alone.double == 2 * single.double == 2 * shared.double
    assert alone.disk == 0 < shared.disk and alone.memory == shared.memory


def test_gradients_on_disk_take_no_memory(cell_config):
    on_disk, held = (estimate([cell_config("estimator=gfwsvd", f"estimator.store={s}")]) for s in ("disk", "device"))
    assert on_disk.memory < held.memory and on_disk.disk == held.disk


def test_checkpointed_blocks_take_less_memory_and_more_time(cell_config):
    kept, again = (
        estimate([cell_config("profile=paper", "estimator=facts", f"hardware.memory.checkpoint_blocks={choice}")])
        for choice in ("false", "true")
    )
    assert again.batch < 0.3 * kept.batch and again.moments == kept.moments
    assert again.passes - kept.passes == pytest.approx(16_384)


def test_fewer_layers_at_once_take_less_memory_and_more_passes(cell_config):
    whole, one, many = (
        estimate([cell_config("estimator=facts", f"hardware.memory.layers_at_once={n}")]) for n in ("null", 1, 99)
    )
    layers = select_layers(open_cell(cell_config()).model).layers
    assert one.moments == 4 * max(layer.in_features**2 + layer.out_features**2 for layer in layers.values())
    assert one.passes > whole.passes and one.disk == whole.disk and one.double == whole.double
    assert many == whole


def test_a_language_model_is_measured_without_computing_too():
    """Checkpointed blocks too. Attention without kernels of its own, of which the meta device has none."""
    model, ids = make_causal_lm(dtype=torch.float32), torch.randint(64, (2, 12))
    model.set_attn_implementation("eager")
    skeleton = copy.deepcopy(model).to("meta")
    bytes_of = []
    for network, inputs in ((model, ids), (skeleton, ids.to("meta"))):
        own = select_layers(network).layers
        bytes_of.append([kept_bytes(network, own, inputs, blocks) for blocks in ((), network.model.layers)])
    assert bytes_of[0] == bytes_of[1]
    assert bytes_of[0][1] < 0.7 * bytes_of[0][0]


def test_a_measured_search_takes_longer_than_uniform_ranks(cell_config):
    uniform, cors, asvd = (estimate([cell_config(f"search={name}")]) for name in ("uniform", "cors", "asvd"))
    assert uniform.passes < cors.passes < asvd.passes
    slow, fast = Rates(1e9, 1e9, {}), Rates(1e10, 1e10, {})
    assert uniform.seconds(slow) == pytest.approx(10 * uniform.seconds(fast))
    timed = Rates(1e9, 1e9, {uniform.recipe: 2.0})
    assert uniform.seconds(timed) == pytest.approx(2 * uniform.passes + uniform.double / 1e9)


@pytest.mark.parametrize("moment", [InputGram(), SampleGradGrams(), GroupGradients(group_size=3)])
def test_moments_hold_as_many_numbers_as_they_say(moment):
    layer, batches = torch.nn.Linear(5, 12), [(torch.randn(4, 5), torch.randint(12, (4,))) for _ in range(2)]
    moments = collect_moments(layer, {"": layer}, batches, [moment])  # kept, since files go with it
    total = moments[""][moment]
    tensors = total.chunks() if isinstance(moment, GroupGradients) else total
    assert sum(tensor.numel() for tensor in tensors) == moment.num_values(5, 12, num_samples=8)
