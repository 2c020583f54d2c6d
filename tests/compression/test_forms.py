"""Forms of low-rank layers through a whole compression."""

import pytest
import torch

import facts
from facts.compression.compress import compress_prepared
from facts.estimators import PELA
from facts.models import TimmModel
from facts.search import Uniform
from facts.search.budget import Budget
from tests.networks import LAYERS


@pytest.mark.parametrize(
    ("search", "cost"),
    [*((name, "flops") for name in ("uniform", "cors", "cors_fisher", "asvd", "memvit")), ("cors", "params")],
)
def test_every_search_meets_the_budget_with_pivoted_layers(model, batches, search, cost):
    result = facts.compress(model, batches, search=search, form="pivoted", ratio=0.6, cost=cost)
    summary = result.summary
    assert 0.4 * summary.budget[cost] < summary.spent[cost] <= summary.budget[cost]
    assert facts.count_cost(result.model, (3, 8, 8)) == summary.after
    assert (summary.form, "pivoted" in str(summary)) == ("pivoted", True)
    assert 0 <= summary.rounding < 1e-5
    dense = dict(model.named_modules())
    spent = sum(
        layer.num_weights if isinstance(layer := result.model.get_submodule(name), facts.PivotedLinear)
        else dense[name].weight.numel()
        for name in LAYERS
    )  # fmt: skip
    assert cost == "flops" or spent == summary.spent["params"]


def test_flops_and_parameters_of_deit_b_by_hand():
    """Half of the linear layers, on 198 tokens: the largest ranks k with k (d_out + d_in - k) <= d_out d_in / 2."""
    with torch.device("meta"):
        deit = TimmModel(tag="deit_base_distilled_patch16_224", weights="random").build()
    calibration = facts.prepare(deit, input_shape=(3, 224, 224))
    result = compress_prepared(calibration, PELA(), Uniform(), Budget.of(0.5), form="pivoted")
    ranks = {"attn.qkv": (2304, 768, 321), "attn.proj": (768, 768, 224), "mlp.fc1": (3072, 768, 336)}
    ranks["mlp.fc2"] = (768, 3072, 336)
    saved = 0
    for layer, (d_out, d_in, rank) in ranks.items():
        assert rank * (d_out + d_in - rank) <= d_out * d_in / 2 < (rank + 1) * (d_out + d_in - rank - 1)
        assert {result.plan[f"blocks.{block}.{layer}"] for block in range(12)} == {rank}
        saved += 12 * (d_out * d_in - rank * (d_out + d_in - rank))
    before, after = result.summary.before, facts.count_cost(result.model, (3, 224, 224))
    assert f"{before.flops / 1e9:.2f}" == "33.89"  # the paper's
    assert after.flops == before.flops - 2 * 198 * saved
    assert after.params == before.params - saved
    assert after == result.summary.after
