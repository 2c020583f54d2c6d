"""Language models of several architectures through the whole of the library."""

from tests.language import installed  # noqa: F401, I001

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

import facts
from facts.parts.layers import select_layers
from facts.cost.count import count_cost
from facts.modules.linear_calls import skeleton, with_linear_layers
from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import run
from tests.language.architectures import CONFIGURATIONS, LAYERS, build, sequences


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_every_linear_layer_of_the_blocks_is_compressed_and_nothing_else(kind):
    model, batches = build(kind), sequences()
    form = "pivoted" if kind == "llama" else "plain"
    result = facts.compress(model, batches, form=form, ratio=0.5, cost="params", search="uniform")
    assert len(result.plan) == LAYERS[kind]
    assert not any(part in name for name in result.plan for part in ("head", "embed", "output_projection"))
    compressed = {name for name, module in result.model.named_modules() if isinstance(module, LowRankLayer)}
    assert compressed == set(result.plan)
    tokens = batches[0][0]
    assert run(result.model, tokens).isfinite().all() and run(result.model, tokens).shape == (3, 12, 64)
    assert result.summary.spent["params"] <= result.summary.budget["params"]
    own = {parameter for parameter in model.parameters()}  # tied embeddings count once
    assert facts.count_cost(model, (1, 12)).params == sum(parameter.numel() for parameter in own)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_all_components_together_are_the_dense_model(kind):
    model, batches = build(kind), sequences()
    calibration = facts.prepare(model, batches)
    decompositions = calibration.decompositions(facts.estimators.FACTS())
    whole = {name: len(d.energies) for name, d in decompositions.items()}
    rebuilt = calibration.apply(whole, decompositions)
    expected, found = (run(each, batches[0][0]) for each in (model, rebuilt))
    assert torch.allclose(found, expected, atol=1e-3 * expected.abs().max().item())  # float32, through two blocks


def test_a_copy_shares_the_tokenizer_and_keeps_weights_tied():
    model = build("gpt2")
    model.tokenizer = object()
    copied, compressed = skeleton(model), facts.compress(model, sequences()).model
    assert compressed.tokenizer is copied.tokenizer is model.tokenizer
    assert {tensor.device.type for tensor in copied.state_dict().values()} == {"meta"}
    for each in (model, copied, compressed):
        assert each.lm_head.weight is each.transformer.wte.weight
    assert not {id(weight) for weight in model.parameters()} & {id(weight) for weight in compressed.parameters()}


def test_gpt2_s_layers_become_linear_ones_that_compute_the_same():
    configuration = transformers.AutoConfig.for_model(**CONFIGURATIONS["gpt2"])
    original = transformers.AutoModelForCausalLM.from_config(configuration).eval()
    before = copy.deepcopy(original.state_dict())
    changed = with_linear_layers(original)
    tokens = sequences()[0][0]
    assert torch.allclose(run(changed, tokens), run(original, tokens), atol=1e-6)  # the order of a sum, in float32
    assert changed.lm_head.weight is changed.transformer.wte.weight
    assert all(before[name].equal(tensor) for name, tensor in original.state_dict().items())
    assert len(select_layers(changed).layers) == LAYERS["gpt2"]
    result = facts.compress(original, sequences(), parts="layers")  # no need to change it oneself
    assert result.plan.keys() == select_layers(changed).layers.keys()
    assert count_cost(original, (1, 12)) == count_cost(changed, (1, 12))


def test_divergence_in_parts_is_that_of_the_whole(monkeypatch):
    original, changed = torch.randn(2, 3, 5, 7)
    whole = F.kl_div(
        changed.double().log_softmax(-1), original.double().log_softmax(-1), reduction="sum", log_target=True
    )
    monkeypatch.setattr(facts.moments.losses, "KL_VALUES", 14)
    assert torch.isclose(facts.moments.losses.kl_divergence(original, changed), whole, rtol=1e-12)
