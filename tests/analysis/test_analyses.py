"""Cosines with the Fisher, the cross-token terms that factors drop, speeds of variants, and coupling at a layer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import facts
from facts.analysis import AnalysisInputs, CrossMoments, FisherSimilarity, Throughput, TokenCoupling
from facts.analysis.fisher import groups_within
from facts.analysis.throughput import make_variant
from facts.analysis.token_coupling import TokenStore, cross_token_coupling, distance_correlations
from facts.cost.count import count_params
from facts.cost.timing import TimingPolicy, batch_seconds
from facts.estimators import ESTIMATORS, FACTS
from facts.modules.lowrank import LowRankLinear
from facts.moments.batch import LayerBatch
from facts.moments.data_pass import DataPass
from facts.moments.losses import summed_cross_entropy
from facts.parts.layers import select_layers
from tests.networks import LAYERS, UNIFORM, compress_on_all, image_batches, make_model
from tests.oracles.factors import ORACLES, every
from tests.oracles.fisher import dense_fisher, dense_product, dense_token_local, matrix_cosine
from tests.oracles.samples import model_samples
from tests.refusals import refuses
from tests.toys import Net, linears

NUM_PROBES = 1024
QUICK = TimingPolicy(num_turns=2, min_seconds=0)
IMAGES = image_batches([4])[0][0]
HYPPO = {"modname": "hyppo", "reason": "the extra `analysis` is not installed"}


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


def exact(data, name, layer):
    *_, calibration, held_out = data
    samples = every(held_out[layer])
    d_out, d_in = samples[0].D.shape
    return matrix_cosine(dense_fisher(samples), dense_product(*ORACLES[name](calibration[layer]), d_in, d_out))


@pytest.mark.parametrize("name", ["facts", "kfac_reduce", "gfwsvd", "fwsvd"])
def test_every_layer_lies_near_its_dense_cosine(data, name):
    """Within four standard errors, which are neither much too large nor too small; the mean over layers too."""
    findings = FisherSimilarity(num_probes=NUM_PROBES).run(inputs_of(data, ESTIMATORS[name]()))
    expected = {layer: exact(data, name, layer) for layer in LAYERS}
    found = findings.values
    scores = [(found[layer]["cosine"] - expected[layer]) / found[layer]["cosine_error"] for layer in LAYERS]
    assert max(map(abs, scores)) < 4 and 0.3 < torch.tensor(scores).square().mean().sqrt() < 2, scores
    assert abs(findings.metrics["cosine"] - sum(expected.values()) / len(LAYERS)) < 4 * findings.metrics["cosine_error"]


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
    prepared = facts.prepare(ignoring, [(torch.randn(4, 12), torch.randint(12, (4,)))], held_out=())
    wanted = AnalysisInputs(prepared=prepared, held_out=prepared, estimator=ESTIMATORS["svd_llm"]())
    refuses("layer ignored: the cosine is not defined", FisherSimilarity(num_probes=2).run, wanted)
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
def test_the_fisher_without_its_token_local_part_and_the_loss_along_the_change(found, layer):
    """Within four standard errors of the dense ratio; vec(ΔW)ᵀ (F - F_local) vec(ΔW) over vec(ΔW)ᵀ F_local vec(ΔW)."""
    findings, changes, samples = found
    whole, local = dense_fisher(every(samples[layer])), dense_token_local(every(samples[layer]))
    exact = ((whole - local).norm() / local.norm()).item()
    estimate, error, loss = (findings.values[layer][key] for key in ("operator", "operator_error", "loss"))
    assert abs(estimate - exact) <= 4 * error + 1e-12
    if layer == "vector":  # one token: nothing to drop
        assert exact < 1e-12
    change = changes[layer].detach().T.flatten()
    assert loss == pytest.approx((change @ whole @ change / (change @ local @ change) - 1).item(), rel=1e-7, abs=1e-9)


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


def test_only_compressed_layers_have_a_loss():
    model, batches = make_model(), image_batches([3])
    findings = CrossMoments(num_probes=2).run(held_out_alone(model, batches))
    assert set(findings.metrics) == {"cross_operator", "cross_input_side", "cross_grad_side"}
    compressed = facts.compress(model, batches, layers=["tokens"]).model
    findings = CrossMoments(num_probes=2).run(held_out_alone(model, batches, compressed))
    assert [name for name, ratios in findings.values.items() if "loss" in ratios] == ["tokens"]
    assert findings.metrics["cross_loss"] == findings.values["tokens"]["loss"]


@pytest.fixture
def compressed(model):
    return facts.compress(facts.prepare(model, input_shape=(3, 8, 8)), estimator="pela", ratio=0.5, **UNIFORM).model


def test_findings_with_variants(model, compressed):
    inputs = held_out_alone(model.float(), image_batches([2], dtype=torch.float32), compressed.float())
    found = Throughput(batch_size=4, timing=QUICK, variants=("residual", "half", "two_of_four")).run(inputs)
    rates = {name: speed["throughput"] for name, speed in found.values["speeds"].items()}
    assert found.metrics["speedup"] == pytest.approx(rates["compressed"] / rates["dense"])
    assert found.metrics["speedup_error"] > 0
    assert found.metrics["latency_ms"] == pytest.approx(4000 / rates["compressed"])
    if not torch.cuda.is_available():
        assert set(rates) == {"dense", "compressed", "residual", "half"}
        assert "compute capability" in found.values["missing"]["two_of_four"]


def test_residuals_are_added_to_low_rank_layers_and_take_five_percent(model, compressed):
    layers = select_layers(model).layers
    network = make_variant("residual", model, compressed, layers)
    assert network(IMAGES).isfinite().all() and not torch.equal(network(IMAGES), compressed(IMAGES))
    shapes = [layers[name].weight.shape for name in layers if isinstance(compressed.get_submodule(name), LowRankLinear)]
    added = sum(max(1, int(0.05 * (shape.numel() // sum(shape)))) * sum(shape) for shape in shapes)
    assert added and count_params(network) - count_params(compressed) == added
    assert not any("residual" in name for name, _ in compressed.named_modules())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_network_in_half_precision_gets_its_inputs_in_it(model, compressed, precision):
    half, types = make_variant("half", model.float(), compressed, {}), set()
    half.vector.register_forward_hook(lambda _, args, output: types.update((args[0].dtype, output.dtype)))
    found = batch_seconds({"dense": model, "half": half}, IMAGES.float(), QUICK, precision)
    assert found["half"].median > 0 and types == {torch.float16}
    assert next(model.parameters()).dtype == torch.float32


def filled(x, g, sizes=None):
    store = TokenStore()
    for x_part, g_part in zip(x.split(sizes or len(x)), g.split(sizes or len(g)), strict=True):
        store.add(LayerBatch(x_part, g_part))
    return store


def tensors(num_samples=30, tokens=5, d_in=4, d_out=3, dtype=torch.float64):
    x = torch.randn(num_samples, tokens, d_in, dtype=dtype)
    return x, torch.randn(num_samples, tokens, d_out, dtype=dtype) * torch.rand(tokens, 1, dtype=dtype)


@pytest.mark.parametrize("max_bytes", [1, 30**2 * 8 * 2, 2**27])
@pytest.mark.parametrize("sizes", [None, [7, 20, 3]])
def test_the_map_holds_the_products_of_the_tokens_own_fishers(sizes, max_bytes):
    """‖K_x ⊙ K_g‖² = ⟨F_t, F_s⟩ with F_t the second moment of vec(g_t x_tᵀ), whatever the blocks and batches."""
    x, g = tensors()
    grads = torch.einsum("kti,ktj->tkij", g, x).flatten(2)
    fishers = grads.mT @ grads
    squares = torch.einsum("tij,sij->ts", fishers, fishers)
    expected = squares.sqrt() / squares.diagonal().sqrt().mean()
    torch.testing.assert_close(cross_token_coupling(filled(x, g, sizes), max_bytes), expected, rtol=1e-12, atol=0)


def test_what_is_stored_is_what_the_layers_see():
    model, batches = make_model(), image_batches([3, 3, 1])
    stores = {name: TokenStore() for name in select_layers(model).layers}
    layers = {name: model.get_submodule(name) for name in stores}
    add = lambda name, batch: stores[name].add(batch)  # noqa: E731
    DataPass(model, layers, add, summed_cross_entropy, torch.float32, True).run(batches, "tokens")
    samples = model_samples(model, batches, summed_cross_entropy)
    for name, store in stores.items():
        for kind, side in (("inputs", "X"), ("grads", "G")):
            expected = torch.stack([getattr(sample, side) for sample in every(samples[name])], dim=1)
            expected = expected / expected.square().mean().sqrt()
            actual = torch.cat([store.read(kind, t, t + 1) for t in range(store.num_tokens)])
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def unbiased_distance_correlation(x, g):
    """The formulas of Székely and Rizzo (2014), word for word."""

    def centred(values):
        distances = cdist(values, values)
        n = len(distances)
        rows, columns = distances.sum(0, keepdims=True) / (n - 2), distances.sum(1, keepdims=True) / (n - 2)
        centred = distances - rows - columns + distances.sum() / ((n - 1) * (n - 2))
        np.fill_diagonal(centred, 0)
        return centred

    a, b = centred(x), centred(g)
    return (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())


def test_other_token_counts_and_too_few_samples_are_refused():
    pytest.importorskip(**HYPPO)
    refuses("5 before, 4 now", filled(*tensors(tokens=5)).add, LayerBatch(*tensors(tokens=4)))
    refuses("at least 21 samples, got 20", distance_correlations, filled(*tensors(num_samples=20)))


@pytest.mark.system  # in a new environment, Numba compiles hyppo's functions for half a minute
def test_distance_correlations_are_those_of_the_definition():
    pytest.importorskip(**HYPPO)
    x, g = tensors(num_samples=60)
    g[:, 1] = x[:, 1, :3].square()  # a dependence without correlation
    correlations, p_values = distance_correlations(filled(x, g))
    expected = [unbiased_distance_correlation(x[:, t], g[:, t]) for t in range(5)]
    assert correlations == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert p_values[1] < 0.01 and min(np.delete(p_values, 1)) > 0.01
    x[:, 0], g[:, 2] = 1.0, 0.0  # tokens that never vary have none
    for values in distance_correlations(filled(x, g)):
        assert [value is None for value in values] == [True, False, True, False, False]


@pytest.mark.system
@pytest.mark.parametrize("layer", ["tokens", "vector"])
def test_findings_of_a_layer(layer):
    """The network's `vector` sees one token, so it has no pairs."""
    pytest.importorskip(**HYPPO)
    prepared = facts.prepare(make_model(), image_batches([20, 15]), held_out=())
    findings = TokenCoupling(layer=layer).run(AnalysisInputs(prepared=prepared, held_out=prepared))
    coupling = torch.tensor(findings.values["coupling"], dtype=torch.float64)
    tokens = 16 if layer == "tokens" else 1
    assert coupling.shape == (tokens, tokens) and findings.values["num_samples"] == 35
    assert coupling.diagonal().mean().item() == pytest.approx(1, rel=1e-5)
    off_diagonal = coupling[~torch.eye(tokens, dtype=torch.bool)].mean().item()
    assert findings.metrics.get("off_diagonal", float("nan")) == pytest.approx(off_diagonal, rel=1e-5, nan_ok=True)
    correlations = findings.values["distance_correlation"]
    assert findings.metrics["distance_correlation"] == pytest.approx(sum(correlations) / tokens)
