"""NViT's widths, importance, and table of block times."""

from types import SimpleNamespace

import pytest
import torch

from facts.pruning.methods import nvit
from facts.pruning.methods.nvit import NarrowAttention, importance, widths_of, without
from tests.networks import image_batches
from tests.pruning.problems import make_vit


def narrowable(**arguments):
    model = make_vit(**arguments)
    for block in model.blocks:
        block.attn = NarrowAttention(block.attn)
    return model


@pytest.mark.parametrize(
    ("width", "silence"),
    [
        ("blocks.0.heads", lambda block: block.attn.proj.weight.unflatten(1, (3, 8))[:, 1]),
        ("blocks.0.key_dims", lambda block: block.attn.qkv.weight[:24].unflatten(0, (3, 8))[:, 1]),
        ("blocks.0.value_dims", lambda block: block.attn.proj.weight.unflatten(1, (3, 8))[:, :, 1]),
        ("blocks.0.hidden", lambda block: block.mlp.fc2.weight[:, 1]),
    ],
)
def test_units_without_effect_can_go(width, silence):
    """They have the least importance, and without them the network computes what it did."""
    model = narrowable()
    with torch.no_grad():
        silence(model.blocks[0]).zero_()
        if width.endswith("key_dims"):  # the bias of the query is what is left of it
            model.blocks[0].attn.qkv.bias[:24].unflatten(0, (3, 8))[:, 1] = 0
    images, labels = image_batches([8], dtype=torch.float32)[0]
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    widths = widths_of(model)
    scores = importance(model, widths)[width]
    kept = {name: torch.ones(each.size, dtype=torch.bool) for name, each in widths.items()}
    kept[width][1] = False
    if not width.endswith("key_dims"):  # the keys that no query meets still have no gradient of their own
        assert scores.argmin() == 1
    torch.testing.assert_close(without(model, widths, kept)(images), model(images))


class ExactTimer:
    """A stopwatch for blocks that take a second for each of their multiplications, or so."""

    def __init__(self, statement, globals, num_threads):
        block, inputs = globals["block"], globals["inputs"]
        attention, embedding = block.attn, inputs.shape[-1]
        features = block.mlp.fc1.out_features + 2 * attention.num_heads * (attention.key_dim + attention.value_dim)
        self.seconds = embedding * features + attention.num_heads * attention.key_dim

    def blocked_autorange(self, min_run_time):
        return SimpleNamespace(median=self.seconds)


def test_block_times_are_linear_between_measurements(monkeypatch):
    monkeypatch.setattr(nvit, "Timer", ExactTimer)
    model = narrowable()
    saved = nvit.BlockTimes(model, 4, 6).savings(widths_of(model))
    assert saved["blocks.1.hidden"] == pytest.approx(24)
    assert saved["blocks.0.heads"] == pytest.approx(24 * 32 + 8)
    assert saved["embedding"] == pytest.approx(2 * (48 + 3 * 32))
