"""Every method: its budget, its file of settings, and what it refuses."""

import copy
from pathlib import Path

import pytest
import timm
from omegaconf import OmegaConf

from experiments.config import CONF, instantiate
from facts.cost.count import count_cost
from facts.pruning import DISP, PRUNERS, Isomorphic, NViT
from tests.pruning.problems import make_problem, make_vit

QUICK = {
    "disp_llm": DISP(num_steps=3),
    "isomorphic": Isomorphic(round_to=1),
    "nvit": NViT(num_steps=2, steps_between=2),
}
# One channel of the embedding, or of all heads, is the least that these methods take from the small network.
GRANULARITY = {"isomorphic": 0.08, "disp_llm": 0.01, "nvit": 0.08}

every_method = pytest.mark.parametrize("name", PRUNERS)


@every_method
def test_the_file_says_the_defaults_of_the_class(name):
    config = OmegaConf.merge({"seed": 0}, OmegaConf.load(Path(CONF) / "pruning" / f"{name}.yaml"))
    assert instantiate(config.paper) == PRUNERS[name]()
    for profile in (config.paper, config.mini):
        assert set(profile) - {"_target_"} == set(PRUNERS[name].__dataclass_fields__)


@every_method
def test_the_original_is_untouched_and_the_result_runs(name):
    model = make_vit()
    before = copy.deepcopy(model)
    problem = make_problem(model)
    pruned = copy.deepcopy(QUICK[name].prune(problem))
    spent, dense = (count_cost(network, (3, 8, 8)).params for network in (pruned, model))
    assert spent == problem.spent(pruned)
    assert problem.ratio - GRANULARITY[name] < spent / dense <= problem.ratio
    for (key, now), then in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        assert now.equal(then), key
    assert all(parameter.grad is None for parameter in [*model.parameters(), *pruned.parameters()])
    assert all(parameter.requires_grad for parameter in pruned.parameters())
    images = next(iter(problem.batches))[0]
    assert model(images).equal(before(images))
    assert pruned(images).shape == (8, 4) and pruned(images).isfinite().all()
    pruned(images).sum().backward()  # it can be finetuned
    assert not pruned.training


@every_method
def test_plain_networks_and_a_budget_of_flops(name):
    arguments = {"qkv_bias": False, "global_pool": "avg", "class_token": False, "depth": 1}
    problem = make_problem(make_vit("vit_tiny_patch16_224", **arguments), cost="flops")
    pruned = QUICK[name].prune(problem)
    assert count_cost(pruned, (3, 8, 8)).flops <= problem.budget
    assert pruned(next(iter(problem.batches))[0]).isfinite().all()


@every_method
def test_a_budget_out_of_reach(name):
    with pytest.raises(ValueError, match=r"use a (larger ratio|ratio above)"):
        QUICK[name].prune(make_problem(make_vit(depth=1), ratio=0.001))
    with pytest.raises(ValueError, match=r"must lie in \(0, 1\], got 0"):
        make_problem(ratio=0)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (lambda: timm.create_model("test_resnet"), "this is a ResNet"),
        (lambda: make_vit(init_values=0.1), "this one has blocks.0.ls1.gamma"),
        (lambda: QUICK["disp_llm"].prune(make_problem()), "this one has|block 0 of this one was changed"),
    ],
)
def test_networks_that_cannot_be_pruned(model, what):
    with pytest.raises(ValueError, match=rf"vision transformers \(vit_\*, deit_\*\).*({what})"):
        QUICK["nvit"].prune(make_problem(model()))
