"""Architectures of timm, small and with random weights: compressed without a word about their layers."""

import pytest
import timm
import torch

import facts
from facts.models import TimmModel
from facts.modules.forms import FORMS
from facts.modules.lowrank import LowRankLayer
from tests.networks import relative_error

WINDOWS = {"img_size": 64, "embed_dim": 48, "depths": (1, 1), "num_heads": (2, 4)}
TINY = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 2}
ARCHITECTURES = {
    "vit_tiny_patch16_224": TINY,
    "deit3_small_patch16_224": TINY,
    "beit_base_patch16_224": TINY,
    "eva02_tiny_patch14_224": {**TINY, "img_size": 56},
    "cait_xxs24_224": TINY,
    "maxvit_rmlp_pico_rw_256": {"img_size": 64, "depths": (1, 1), "embed_dim": (32, 64)},
    "mixer": {"img_size": 64, "embed_dim": 48, "num_blocks": 2, "patch_size": 16},
    "convnextv2_atto": {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)},
    "swinv2_tiny_window8_256": {**WINDOWS, "window_size": 4},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32), "num_heads": (1, 2, 2, 4)},
}


@pytest.fixture(params=ARCHITECTURES)
def network(request):
    torch.manual_seed(0)
    arguments = {"num_classes": 10, **ARCHITECTURES[request.param]}
    if request.param == "mixer":  # no name of timm's leads to a small one
        return timm.models.MlpMixer(**arguments).eval()
    return TimmModel(tag=request.param, weights="random", arguments=arguments).build()


@pytest.fixture
def loader(request, network):
    size = ARCHITECTURES[request.node.callspec.params["network"]].get("img_size", 64)
    return [(torch.randn(4, 3, size, size), torch.randint(10, (4,)))]


@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_pivoted_layers_multiply_as_plain_ones(network, loader, ratio):
    """Of the same rank: in float32 to 1e-5, in bfloat16 with at most twice the error."""
    calibration = facts.prepare(network, loader)
    decompositions = calibration.decompositions(facts.estimators.FACTS())
    assert len(calibration.layers) >= 2
    for name, layer in calibration.layers.items():
        rank = FORMS["pivoted"].rank_of_ratio(layer.out_features, layer.in_features, ratio)
        left, right = decompositions[name].truncate(rank)
        vectors = torch.randn(64, layer.in_features, generator=torch.Generator().manual_seed(0))
        exact = vectors.double() @ right.double().T @ left.double().T
        for dtype in (torch.float32, torch.bfloat16):
            dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=dtype)
            plain, pivoted = (FORMS[form].layer(dense, left, right) for form in ("plain", "pivoted"))
            with torch.inference_mode():
                errors = [relative_error(each(vectors.to(dtype)).double(), exact) for each in (plain, pivoted)]
            assert errors[1] < 1e-5 if dtype == torch.float32 else errors[1] <= 2 * errors[0], (name, errors)


@pytest.mark.parametrize(
    "options", [{"ratio": 0.5}, {"search": "cors", "ratio": 0.6, "convolutions": True}, {"form": "pivoted"}], ids=str
)
def test_budget_and_outputs(network, loader, options, tmp_path):
    """It runs, keeps to its budget, gives finite outputs, and comes back from a folder that is smaller."""
    images = loader[0][0]
    with torch.no_grad():
        before = network(images)
        result = facts.compress(network, loader, **options)
        assert network(images).equal(before)  # the original is as it was
        outputs = result.model(images)
        facts.save_compressed(result, tmp_path)
        dense = None if hasattr(network, "recipe") else network
        assert facts.load_compressed(tmp_path, model=dense).model(images).equal(outputs)
    summary = result.summary
    assert outputs.isfinite().all()
    assert summary.spent["flops"] <= summary.budget["flops"]
    assert summary.after.flops < summary.before.flops
    assert summary.after.params < summary.before.params
    layers = {name for name, module in result.model.named_modules() if isinstance(module, LowRankLayer)}
    assert layers == {name for name, rank in result.plan.items() if rank is not None}
    assert all(reason for reason in result.skipped.values())
    assert not result.plan.keys() & result.skipped.keys()
