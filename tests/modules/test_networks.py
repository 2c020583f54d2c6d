"""Properties that are read off a network's modules."""

import pytest
from torch import nn

from facts.modules.networks import blocks_of
from tests.networks import make_sharing, make_vit

NESTED = nn.ModuleList([nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)), nn.Linear(4, 4)])


@pytest.mark.parametrize(
    ("model", "layers", "expected"),
    [
        (make_vit(), ["blocks.1.mlp.fc1", "head"], ["blocks.1"]),
        (make_sharing(), ["stem"], ["blocks.0", "blocks.1", "blocks.2"]),  # they share it
        (NESTED, ["0.0.0"], ["0.0"]),
        (NESTED, ["0.0.0", "0.1"], ["0"]),  # without the one within it
    ],
)
def test_blocks_of_layers(model, layers, expected):
    blocks = blocks_of(model, [model.get_submodule(name) for name in layers])
    assert [name for name, module in model.named_modules() if module in blocks] == expected
