"""Every stage runs on a device that is not the CPU, and gives there what it gives on the CPU."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import facts
from experiments.mini.digits import Digits
from experiments.runner import run_cell
from facts.estimators import ESTIMATORS, GFWSVD
from facts.modules.lowrank import LowRankLayer
from tests.devices.pretended import pretended_cuda, values_of
from tests.networks import image_batches, make_causal_lm, make_model, make_vit

pytestmark = pytest.mark.system

BATCHES, LARGER = image_batches([4, 4, 4]), image_batches([4, 4], shape=(3, 16, 16))
TEXTS = list(torch.randint(64, (3, 2, 12), generator=torch.Generator().manual_seed(0)))
HOST = facts.MemoryPolicy(moments="host", layers_at_once=2)
WORKS = {
    "host": (make_vit, LARGER, {"execution": facts.Execution(memory=HOST)}),
    "measured": (make_vit, LARGER, {"search": "cors"}),
    "own loss": (make_vit, LARGER, {"loss": lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="sum")}),
    "units and tokens": (make_vit, LARGER, {"parts": "units,tokens"}),
    "units": (make_vit, LARGER, {"parts": "units", "search": "uniform"}),
    "language model": (make_causal_lm, TEXTS, {"form": "plain"}),
}


def weights(model, batches, **options):
    """Weights of a compressed and recovered network, of low-rank layers the products: vectors have either sign."""
    result = facts.compress(model, batches, ratio=0.6, **options)
    recovered = facts.recover(result, batches, epochs=1, num_warmups=0, precision="float32").model
    layers = {name: each for name, each in recovered.named_modules() if isinstance(each, nn.Linear | LowRankLayer)}
    return {name: values_of(layer.weight.detach()).cpu() for name, layer in layers.items()}


@pytest.mark.parametrize("name", WORKS)
def test_a_compression_and_its_recovery(name):
    make, batches, options = WORKS[name]
    here = weights(make(), batches, **options)
    with pretended_cuda():
        there = weights(make().to("cuda"), batches, **options)
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)


def test_a_cut_of_an_elastic_folder(tmp_path):
    model, (inputs, _) = make_vit(), LARGER[0]
    facts.save_elastic(facts.compress(model, LARGER, parts="units", ratio=0.6), tmp_path)
    here = facts.load_compressed(tmp_path, make_vit(), ratio=0.7).model(inputs)
    with pretended_cuda():
        there = facts.load_compressed(tmp_path, make_vit().to("cuda"), ratio=0.7).model(inputs.to("cuda"))
        torch.testing.assert_close(values_of(there), here, rtol=1e-6, atol=1e-8)


def test_a_cell(make_cell, monkeypatch):
    monkeypatch.setattr(Digits, "num_evaluation", 128)
    small = ["task.mini.num_calibration=64", "task.mini.num_sensitivity=16"]
    small += ["parts='units,tokens'", "search=cors_fisher"]
    here = run_cell(make_cell(*small))
    with pretended_cuda():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a pretended GPU")
        there = run_cell(make_cell(*small, "hardware=cuda"))
    assert there.metrics == pytest.approx(here.metrics, rel=1e-3) and there.fingerprint != here.fingerprint


def halves(model, estimator):
    """Each layer's best approximation of about half its rank."""
    found = facts.prepare(model, BATCHES).decompositions(estimator)
    pairs = {name: each.truncate(len(each.energies) // 2) for name, each in found.items()}
    return {name: values_of(left @ right).cpu() for name, (left, right) in pairs.items()}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_decompositions_by_every_estimator(name):
    estimator = GFWSVD(group_size=2) if name == "gfwsvd" else ESTIMATORS[name]()
    here = halves(make_model(), estimator)
    with pretended_cuda(), patch("torch.linalg.svd", side_effect=AssertionError("slow there")):
        there = halves(make_model().to("cuda"), estimator)
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)
