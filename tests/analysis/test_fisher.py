"""The Fisher of whole networks: cosines of the factors, and the cross-token terms that they drop."""

from dataclasses import replace

import pytest
import torch

import facts
from facts.analysis import AnalysisInputs, CrossMoments, FisherSimilarity
from facts.analysis.fisher import groups_within
from facts.estimators import ESTIMATORS, FACTS
from facts.estimators.whitening import shrink
from facts.moments.losses import summed_cross_entropy
from tests.networks import LAYERS, UNIFORM, compress_on_all, image_batches, make_model
from tests.oracles.factors import ORACLES, every
from tests.oracles.fisher import dense_fisher, dense_product, dense_token_local, matrix_cosine
from tests.oracles.samples import model_samples
from tests.toys import Net, linears

NUM_PROBES = 1024


@pytest.fixture(scope="module")
def data():
    """A network, batches for factors and others to compare with, and the samples of both."""
    model = make_model()
    calibration, held_out = image_batches([4, 4], seed=1), image_batches([5, 1], seed=2)
    samples = [model_samples(model, batches, summed_cross_entropy) for batches in (calibration, held_out)]
    return model, calibration, held_out, *samples


def inputs_of(data, estimator, **settings):
    model, calibration, held_out, *_ = data
    prepared = facts.prepare(model, calibration, held_out=(), **settings)
    return AnalysisInputs(prepared=prepared, held_out=prepared.on(held_out), estimator=estimator)


def exact(data, name, layer, shrinkage=(0.0, 0.0)):
    *_, calibration, held_out = data
    A, B = ORACLES[name](calibration[layer])
    d_out, d_in = every(held_out[layer])[0].D.shape
    A, B = (m if m is None else shrink(m, amount) for m, amount in ((A, shrinkage[1]), (B, shrinkage[0])))
    return matrix_cosine(dense_fisher(every(held_out[layer])), dense_product(A, B, d_in, d_out))


@pytest.mark.parametrize("name", ["facts", "kfac_reduce", "gfwsvd", "fwsvd"])
def test_every_layer_lies_near_its_dense_cosine(data, name):
    """Within four standard errors, which are neither much too large nor too small; the mean over layers too."""
    findings = FisherSimilarity(num_probes=NUM_PROBES).run(inputs_of(data, ESTIMATORS[name]()))
    expected = {layer: exact(data, name, layer) for layer in LAYERS}
    found = findings.values
    scores = [(found[layer]["cosine"] - expected[layer]) / found[layer]["cosine_error"] for layer in LAYERS]
    assert max(map(abs, scores)) < 4 and 0.3 < torch.tensor(scores).square().mean().sqrt() < 2, scores
    mean = sum(expected.values()) / len(LAYERS)
    assert abs(findings.metrics["cosine"] - mean) < 4 * findings.metrics["cosine_error"]


def test_groups_of_layers_and_the_cache_change_nothing(data, tmp_path, monkeypatch):
    plain = FisherSimilarity(num_probes=8).run(inputs_of(data, FACTS()))
    monkeypatch.setattr("facts.analysis.fisher.MAX_VALUES", 8 * 150)
    for _ in range(2):
        again = FisherSimilarity(num_probes=8).run(inputs_of(data, FACTS(), execution=facts.Execution(cache=tmp_path)))
        assert again.metrics == pytest.approx(plain.metrics, rel=1e-9)
    assert list(tmp_path.rglob("FisherProducts*"))
    layers = {str(size): torch.nn.Linear(size, 1, bias=False) for size in (3, 4, 9, 1, 2)}
    assert [list(group) for group in groups_within(layers, 7)] == [["3", "4"], ["9"], ["1", "2"]]


def test_a_layer_without_gradients_is_named():
    ignoring = Net(lambda net, x: net.used(x) + 0 * net.ignored(x), **linears("used", "ignored"))
    batches = [(torch.randn(4, 12), torch.randint(12, (4,)))]
    prepared = facts.prepare(ignoring, batches, held_out=())
    wanted = AnalysisInputs(prepared=prepared, held_out=prepared, estimator=ESTIMATORS["svd_llm"]())
    with pytest.raises(ValueError, match="layer ignored: the cosine is not defined"):
        FisherSimilarity(num_probes=2).run(wanted)
    nothing = dict.fromkeys(("operator", "operator_error", "input_side", "grad_side"), 0.0)
    assert CrossMoments(num_probes=2).run(wanted).values["ignored"] == nothing


@pytest.fixture(scope="module")
def found():
    """Findings of a compressed network, its changes, and every sample alone."""
    model, batches = make_model(), image_batches([4, 3])
    result = compress_on_all(model, batches, ratio=0.5, **UNIFORM)
    findings = CrossMoments(num_probes=NUM_PROBES).run(held_out_alone(model, batches, result.model))
    changes = {name: model.get_submodule(name).weight - result.model.get_submodule(name).weight for name in LAYERS}
    return findings, changes, model_samples(model, batches, summed_cross_entropy)


def held_out_alone(model, batches, compressed=None):
    held_out = facts.prepare(model, batches, held_out=())
    return AnalysisInputs(prepared=replace(held_out, data=None), held_out=held_out, compressed=compressed)


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
    findings = CrossMoments(num_probes=2).run(held_out_alone(model, batches))
    assert set(findings.metrics) == {"cross_operator", "cross_input_side", "cross_grad_side"}
    compressed = facts.compress(model, batches, layers=["tokens"]).model
    findings = CrossMoments(num_probes=2).run(held_out_alone(model, batches, compressed))
    assert [name for name, ratios in findings.values.items() if "loss" in ratios] == ["tokens"]
    assert findings.metrics["cross_loss"] == findings.values["tokens"]["loss"]
