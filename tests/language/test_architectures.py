"""Language models of several architectures through the whole of the library."""

from tests.language import installed  # noqa: F401, I001

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

import facts
from facts.decomposition.apply import apply_plan
from facts.calibration.selection import select_layers
from facts.cost.count import count_cost
from facts.modules.forms import FORMS
from facts.modules.linear_calls import skeleton, with_linear_layers
from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import run
from facts.moments.losses import NOTHING, next_tokens, summed_cross_entropy
from tests.language.architectures import CONFIGURATIONS, LAYERS, build, sequences


@pytest.mark.parametrize("form", ["plain", "pivoted"])
@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_every_linear_layer_of_the_blocks_is_compressed_and_nothing_else(kind, form):
    model, batches = build(kind), sequences()
    result = facts.compress(model, batches, form=form, ratio=0.5, cost="params", search="uniform")
    assert len(result.plan) == LAYERS[kind]
    assert not any(part in name for name in result.plan for part in ("head", "embed", "output_projection"))
    compressed = {name for name, module in result.model.named_modules() if isinstance(module, LowRankLayer)}
    assert compressed == set(result.plan)
    tokens = batches[0][0]
    assert run(result.model, tokens).isfinite().all() and run(result.model, tokens).shape == (3, 12, 64)
    assert result.summary.spent["params"] <= result.summary.budget["params"]


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_all_components_together_are_the_dense_model(kind):
    model, batches = build(kind), sequences()
    calibration = facts.prepare(model, batches)
    decompositions = calibration.decompositions(facts.estimators.FACTS())
    whole = {name: len(d.energies) for name, d in decompositions.items()}
    rebuilt = apply_plan(calibration.model, decompositions, whole, FORMS["plain"])
    expected, found = (run(each, batches[0][0]) for each in (model, rebuilt))
    assert torch.allclose(found, expected, atol=1e-3 * expected.abs().max().item())  # float32, through two blocks


def test_a_search_by_divergence_meets_the_budget_and_beats_uniform_ranks():
    model, batches = build("llama"), sequences((16, 16))
    divergence = {}
    for search in ("uniform", "cors"):
        result = facts.compress(model, batches, estimator="svd_llm", search=search, ratio=0.6, cost="params")
        assert result.summary.spent["params"] <= result.summary.budget["params"]
        with torch.no_grad():
            original, changed = (run(each, batches[0][0]) for each in (model, result.model))
        divergence[search] = facts.moments.losses.kl_divergence(original, changed).item()
    assert divergence["cors"] < divergence["uniform"]


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
    result = facts.compress(original, sequences(), ratio=0.5)  # no need to change it oneself
    assert result.plan.keys() == select_layers(changed).layers.keys()
    assert count_cost(original, (1, 12)) == count_cost(changed, (1, 12))


def test_tied_embeddings_stay_tied_and_count_once():
    model = build("qwen3")
    compressed = facts.compress(model, sequences(), ratio=0.5).model
    assert compressed.lm_head.weight is compressed.model.embed_tokens.weight
    own = {parameter for parameter in model.parameters()}
    assert facts.count_cost(model, (1, 12)).params == sum(parameter.numel() for parameter in own)


def test_logits_come_without_a_cache():
    model, (tokens, _) = build("qwen3"), sequences()[0]
    assert model.config.use_cache
    assert torch.equal(run(model, tokens), model(tokens, use_cache=False).logits)
    padded = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    assert torch.allclose(run(model, padded), run(model, tokens), atol=1e-5)


def test_inputs_by_name_compress_as_tokens_do():
    model, batches = build("llama"), sequences()
    by_name = [({"input_ids": tokens}, targets) for tokens, targets in batches]
    ours, theirs = (facts.compress(model, data, estimator="svd_llm") for data in (batches, by_name))
    assert ours.summary.after == theirs.summary.after
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_skeleton_holds_no_weights_and_leaves_the_model_alone():
    model = build("gpt2")
    copied = skeleton(model)
    assert all(tensor.device.type == "meta" for tensor in copied.state_dict().values())
    assert copied.lm_head.weight is copied.transformer.wte.weight
    assert all(tensor.device.type == "cpu" for tensor in model.state_dict().values())


def test_the_loss_is_that_of_transformers():
    model, (tokens, targets) = build("llama"), sequences()[0]
    with torch.no_grad():
        expected = model(tokens, labels=tokens).loss * (targets != NOTHING).sum()
        found = summed_cross_entropy(run(model, tokens), targets)
    assert torch.isclose(found, expected, rtol=1e-5)


def test_next_tokens():
    assert next_tokens(torch.tensor([[3, 1, 2]])).tolist() == [[1, 2, NOTHING]]


def test_divergence_in_parts_is_that_of_the_whole(monkeypatch):
    original, changed = torch.randn(2, 3, 5, 7)
    whole = F.kl_div(
        changed.double().log_softmax(-1), original.double().log_softmax(-1), reduction="sum", log_target=True
    )
    monkeypatch.setattr(facts.moments.losses, "KL_VALUES", 14)
    assert torch.isclose(facts.moments.losses.kl_divergence(original, changed), whole, rtol=1e-12)


def test_a_tokenizer_is_not_copied_with_its_model():
    model = build("llama")
    model.tokenizer = object()
    compressed = facts.compress(model, sequences()).model
    assert compressed.tokenizer is skeleton(model).tokenizer is model.tokenizer
    assert not {id(weight) for weight in model.parameters()} & {id(weight) for weight in compressed.parameters()}
