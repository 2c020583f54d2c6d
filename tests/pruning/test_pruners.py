"""What holds of every method."""

import copy

import pytest
import timm
import torch

from facts.cost.count import count_cost
from facts.pruning import DISP, PRUNERS, Isomorphic, NViT
from tests.networks import image_batches
from tests.pruning.problems import digits_problem, make_problem, make_vit

QUICK = {
    "disp_llm": DISP(num_steps=3),
    "isomorphic": Isomorphic(round_to=1),
    "nvit": NViT(num_steps=2, steps_between=2),
}
# One channel of the embedding, or of all heads, is the least that these methods take from the small network.
GRANULARITY = {"isomorphic": 0.08, "disp_llm": 0.01, "nvit": 0.08}

every_method = pytest.mark.parametrize("name", PRUNERS)


def assert_budget_is_used(name, problem, pruned):
    spent, dense = (getattr(count_cost(model, (3, 8, 8)), problem.cost) for model in (pruned, problem.model))
    assert spent == problem.spent(pruned)
    assert problem.ratio - GRANULARITY[name] < spent / dense <= problem.ratio


@every_method
def test_the_original_is_untouched_and_the_result_runs(name):
    model = make_vit()
    before = copy.deepcopy(model)
    problem = make_problem(model)
    pruned = copy.deepcopy(QUICK[name].prune(problem))
    assert_budget_is_used(name, problem, pruned)
    for (key, now), then in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        assert now.equal(then), key
    assert all(parameter.grad is None for parameter in [*model.parameters(), *pruned.parameters()])
    assert all(parameter.requires_grad for parameter in pruned.parameters())
    images = next(iter(problem.batches))[0]
    assert model(images).equal(before(images))
    assert pruned(images).shape == (8, 4) and pruned(images).isfinite().all()
    pruned(images).sum().backward()  # it can be finetuned
    assert not pruned.training


@pytest.mark.parametrize("pruner", [DISP(num_steps=2), NViT(num_steps=1, steps_between=2, latency_weight=0)])
def test_the_same_again_whatever_was_drawn_before(pruner):
    problem = make_problem()
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outputs.append(pruner.prune(problem)(next(iter(problem.batches))[0]))
    assert outputs[0].equal(outputs[1])


@every_method
@pytest.mark.parametrize("arguments", [{"qkv_bias": False}, {"global_pool": "avg", "class_token": False}])
def test_plain_networks(name, arguments):
    problem = make_problem(make_vit("vit_tiny_patch16_224", **arguments))
    pruned = QUICK[name].prune(problem)
    assert problem.spent(pruned) <= problem.budget
    assert pruned(next(iter(problem.batches))[0]).isfinite().all()


def test_unfused_attention():
    """torch-pruning follows the operations themselves."""
    problem = make_problem()
    for block in problem.model.blocks:
        block.attn.fused_attn = False
    assert QUICK["isomorphic"].prune(problem)(next(iter(problem.batches))[0]).isfinite().all()


@every_method
def test_a_budget_out_of_reach(name):
    with pytest.raises(ValueError, match=r"use a (larger ratio|ratio above)"):
        QUICK[name].prune(make_problem(ratio=0.001))


@every_method
@pytest.mark.parametrize(
    ("model", "what"),
    [
        (lambda: timm.create_model("resnet26"), "this is a ResNet"),
        (lambda: make_vit(init_values=0.1), "this one has blocks.0.ls1.gamma"),
        (lambda: make_vit("vit_tiny_patch16_224", qk_norm=True), "this one has blocks.0.attn.q_norm.weight"),
    ],
)
def test_networks_that_it_does_not_know(name, model, what):
    with pytest.raises(ValueError, match=rf"vision transformers \(vit_\*, deit_\*\).*{what}"):
        QUICK[name].prune(make_problem(model()))


def test_calibration_that_is_empty_or_read_once():
    with pytest.raises(ValueError, match="pruning needs calibration data"):
        make_problem(batches=[])
    assert len(list(make_problem(batches=iter(image_batches([8, 8], dtype=torch.float32))).batches)) == 2


@pytest.mark.system
@every_method
def test_trained_digits(name):
    """A little is pruned from a trained network, which still knows most of the digits."""
    problem, task = digits_problem(ratio=0.9)
    pruned = QUICK[name].prune(problem)
    assert problem.spent(pruned) <= problem.budget
    assert task.evaluate(pruned)["top1"] > 50
