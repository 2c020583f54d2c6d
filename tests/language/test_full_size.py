"""Qwen3-1.7B's architecture at full size, on the meta device."""

from tests.language import installed  # noqa: F401, I001

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from experiments.plan import needs_of
from facts.cost.count import count_cost
from facts.parts.layers import select_layers
from facts.modules.forms import PLAIN

pytestmark = pytest.mark.external

PER_BLOCK = {
    "self_attn.q_proj": (2048, 2048),
    "self_attn.k_proj": (1024, 2048),
    "self_attn.v_proj": (1024, 2048),
    "self_attn.o_proj": (2048, 2048),
    "mlp.gate_proj": (6144, 2048),
    "mlp.up_proj": (6144, 2048),
    "mlp.down_proj": (2048, 6144),
}
EMBEDDINGS, NORMS = 151936 * 2048, 28 * (2 * 2048 + 2 * 128) + 2048


@pytest.fixture
def qwen3(cell_config):
    node = OmegaConf.merge(cell_config("model=qwen3_1_7b").model.paper, {"weights": "random"})
    with torch.device("meta"):
        return instantiate(node).build()


def test_layers_parameters_and_operations(qwen3):
    layers = select_layers(qwen3).layers
    expected = {f"model.layers.{i}.{name}": shape for i in range(28) for name, shape in PER_BLOCK.items()}
    assert {name: tuple(layer.weight.shape) for name, layer in layers.items()} == expected
    linear = 28 * sum(m * n for m, n in PER_BLOCK.values())
    dense = count_cost(qwen3, (1, 2048))
    assert dense.params == linear + EMBEDDINGS + NORMS == 1_720_574_976  # 1.7 billion; 1.4 without the embeddings
    assert dense.flops == 2 * 2048 * (linear + EMBEDDINGS)  # the head shares their weights

    for name, layer in layers.items():
        form = PLAIN
        rank = form.rank_of_ratio(layer.out_features, layer.in_features, 0.7)
        qwen3.set_submodule(name, form.empty(layer, rank))
    small = count_cost(qwen3, (1, 2048))
    kept = 28 * sum(int(m * n // (m + n) * 0.7) * (m + n) for m, n in PER_BLOCK.values())
    assert small.params == kept + EMBEDDINGS + NORMS
    assert small.flops == 2 * 2048 * (kept + EMBEDDINGS)
    assert 0.69 < kept / linear <= 0.7


def test_memory_of_the_calibration(cell_config):
    """In GiB, of parameters, moments and a batch; what transformers keeps may change with its version."""
    cell = ["profile=paper", "model=qwen3_1_7b", "task=language", "ratio=0.7", "cost=params"]
    memory, _ = needs_of([[cell_config(*cell, "hardware.memory.checkpoint_blocks=true")]])
    assert memory / 2**30 - 6.41 - 16.0 == pytest.approx(2.25, rel=0.05)


def test_the_layers_of_the_figure_are_the_network_s(qwen3, cell_config):
    experiment = cell_config("experiment=llm_moments").experiment
    configs = [cell_config(*experiment.overrides, *column) for column in experiment.columns.values()]
    layers = {config.analysis.paper.layer for config in configs}
    assert layers <= select_layers(qwen3).layers.keys()
