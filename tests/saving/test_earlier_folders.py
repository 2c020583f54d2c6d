"""Folders that an earlier version wrote: one for each way of saving, with the outputs and plans of that version."""

import json
from pathlib import Path

import pytest
import timm
import torch

import facts
from facts.modules.networks import run, whole_image

FOLDERS = Path(__file__).with_name("folders")
EXPECTED = json.loads((FOLDERS / "expected.json").read_text())


def dense():
    size = {"depth": 1, "embed_dim": 16, "num_heads": 2, "img_size": 16, "patch_size": 4, "mlp_ratio": 2.0}
    return timm.create_model("vit_tiny_patch16_224", **size, num_classes=6)


@pytest.mark.parametrize("name", ["plain", "pivoted", "units", "elastic", "encoder"])
@torch.no_grad()
def test_a_folder_loads_as_the_network_that_was_saved(name):
    """The encoder is built from its own configuration, the elastic network is cut to 0.6."""
    model, budget = None if name == "encoder" else dense(), {"ratio": 0.6} if name == "elastic" else {}
    loaded = facts.load_compressed(FOLDERS / name, model, **budget)
    assert loaded.plan == EXPECTED[f"{name}_plan"]
    costs, method = loaded.summary.costs, loaded.summary.method
    assert costs.after.params < costs.before.params and costs.spent["flops"] <= costs.budget["flops"] and method.search
    x = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    outputs, expected = whole_image(run(loaded.model, x)), torch.tensor(EXPECTED[name])
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())
