"""Cross-token maps and distance correlations against what one would write first."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import facts
from facts.analysis import AnalysisInputs, TokenCoupling
from facts.analysis.token_coupling import TokenStore, cross_token_coupling, distance_correlations
from facts.moments.batch import LayerBatch
from facts.moments.data_pass import DataPass
from facts.moments.losses import summed_cross_entropy
from facts.parts.layers import select_layers
from tests.networks import image_batches, make_model
from tests.oracles.factors import every
from tests.oracles.samples import model_samples
from tests.refusals import refuses

if find_spec("hyppo") is None:  # slow to import
    pytest.skip("the extra `analysis` is not installed", allow_module_level=True)


def filled(x, g, sizes=None):
    store = TokenStore()
    for x_part, g_part in zip(x.split(sizes or len(x)), g.split(sizes or len(g)), strict=True):
        store.add(LayerBatch(x_part, g_part))
    return store


def tensors(num_samples=30, tokens=5, d_in=4, d_out=3, dtype=torch.float64):
    x = torch.randn(num_samples, tokens, d_in, dtype=dtype)
    g = torch.randn(num_samples, tokens, d_out, dtype=dtype) * torch.rand(tokens, 1, dtype=dtype)
    return x, g


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
            expected = [getattr(sample, side) for sample in every(samples[name])]
            expected = torch.stack(expected, dim=1)
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
    refuses("5 before, 4 now", filled(*tensors(tokens=5)).add, LayerBatch(*tensors(tokens=4)))
    refuses("at least 21 samples, got 20", distance_correlations, filled(*tensors(num_samples=20)))


@pytest.mark.system  # in a new environment, Numba compiles hyppo's functions for half a minute
def test_distance_correlations_are_those_of_the_definition():
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
