"""Cross-token terms that the zero-cross-moment assumption drops, against dense Fishers."""

import pytest
import torch

import facts
from facts.analysis import CrossMoments, Subject
from facts.moments.losses import summed_cross_entropy
from tests.networks import LAYERS, UNIFORM, compress_on_all, image_batches, make_model
from tests.oracles.factors import every
from tests.oracles.fisher import dense_fisher, dense_token_local
from tests.oracles.samples import model_samples

NUM_PROBES = 1024


@pytest.fixture(scope="module")
def found():
    """Findings of a compressed network, its changes, and every sample alone."""
    model, batches = make_model(), image_batches([4, 3])
    result = compress_on_all(model, batches, ratio=0.5, **UNIFORM)
    findings = CrossMoments(num_probes=NUM_PROBES).run(subject(model, batches, result.model))
    changes = {name: model.get_submodule(name).weight - result.model.get_submodule(name).weight for name in LAYERS}
    return findings, changes, model_samples(model, batches, summed_cross_entropy)


def subject(model, batches, compressed=None):
    held_out = facts.prepare(model, batches, held_out=())
    return Subject(calibration=held_out.on([]), held_out=held_out, compressed=compressed)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_fisher_without_its_token_local_part(found, layer):
    """Within four standard errors of the dense ratio."""
    findings, _, samples = found
    local = dense_token_local(every(samples[layer]))
    exact = ((dense_fisher(every(samples[layer])) - local).norm() / local.norm()).item()
    estimate, error = (findings.values[layer][key] for key in ("operator", "operator_error"))
    assert abs(estimate - exact) <= 4 * error + 1e-12
    if layer == "vector":  # one token: nothing to drop
        assert exact < 1e-12


@pytest.mark.parametrize("layer", LAYERS)
def test_the_moments_of_the_assumption(found, layer):
    """The double sum over pairs of distinct tokens: E[(x_t · x_s) g_t g_sᵀ], and the same with x and g exchanged."""
    findings, _, samples = found
    for key, inner, outer in (("grad_side", "X", "G"), ("input_side", "G", "X")):
        kept = dropped = 0
        for sample in every(samples[layer]):
            weights, vectors = (getattr(sample, side) for side in (inner, outer))
            for t in range(len(weights)):
                for s in range(len(weights)):
                    term = (weights[t] @ weights[s]) * torch.outer(vectors[t], vectors[s])
                    kept, dropped = (kept + term, dropped) if t == s else (kept, dropped + term)
        expected = (dropped.norm() / kept.norm()).item() if torch.is_tensor(dropped) else 0.0
        assert findings.values[layer][key] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_loss_along_the_change(found, layer):
    """From the dense Fishers: vec(ΔW)ᵀ (F - F_local) vec(ΔW) over vec(ΔW)ᵀ F_local vec(ΔW)."""
    findings, changes, samples = found
    change = changes[layer].detach().T.flatten()
    local = change @ dense_token_local(every(samples[layer])) @ change
    whole = change @ dense_fisher(every(samples[layer])) @ change
    assert findings.values[layer]["loss"] == pytest.approx((whole / local - 1).item(), rel=1e-7, abs=1e-9)


def test_only_compressed_layers_have_a_loss():
    model, batches = make_model(), image_batches([3])
    findings = CrossMoments(num_probes=2).run(subject(model, batches))
    assert set(findings.metrics) == {"cross_operator", "cross_input_side", "cross_grad_side"}
    compressed = facts.compress(model, batches, layers=["tokens"]).model
    findings = CrossMoments(num_probes=2).run(subject(model, batches, compressed))
    assert [name for name, ratios in findings.values.items() if "loss" in ratios] == ["tokens"]
    assert findings.metrics["cross_loss"] == findings.values["tokens"]["loss"]
