"""Pruning methods: budgets, settings and refusals of all; DISP-LLM's gates, isomorphic groups, NViT's widths."""

import copy
from types import SimpleNamespace

import pytest
import timm
import torch

import facts
from experiments.config import instantiate
from facts.pruning import DISP, PRUNERS, Isomorphic, NViT, PruningProblem
from facts.pruning.methods import nvit
from facts.pruning.methods.disp_llm import gate_widths, gated, indexed, remaining_weights, target_share
from facts.pruning.methods.nvit import NarrowAttention, importance, widths_of, without
from tests.networks import image_batches, same_weights
from tests.refusals import refused, refuses

FEW = NViT(num_steps=2, steps_between=2)
QUICK = {"disp_llm": DISP(num_steps=3), "isomorphic": Isomorphic(round_to=1), "nvit": FEW}
# One channel of the embedding, or of all heads, is the least that these methods take from the small network.
GRANULARITY = {"isomorphic": 0.08, "disp_llm": 0.01, "nvit": 0.08}
every_method = pytest.mark.parametrize("name", PRUNERS)


def make_vit(model="deit_tiny_distilled_patch16_224", **arguments):
    """Two blocks with an embedding of 24, 3 heads of 8 dimensions and 48 hidden units."""
    torch.manual_seed(0)
    small = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2}
    return timm.create_model(model, **{**small, "num_classes": 4, **arguments}).eval()


def make_problem(model=None, ratio=0.6, cost="params", batches=None, **settings):
    batches = image_batches([8, 8], dtype=torch.float32) if batches is None else batches
    calibration = facts.prepare(model or make_vit(), batches, held_out=(), input_shape=(3, 8, 8), **settings)
    return PruningProblem(calibration, ratio, (3, 8, 8), cost)


@pytest.fixture(autouse=True)
def hasty_stopwatch(monkeypatch):
    monkeypatch.setattr(nvit, "MIN_SECONDS", 1e-4)


@every_method
def test_the_file_says_the_defaults_of_the_class(cell_config, name):
    config = cell_config(f"pruning={name}").pruning
    assert instantiate(config.paper) == PRUNERS[name]()
    for profile in (config.paper, config.mini):
        assert set(profile) - {"_target_"} == set(PRUNERS[name].__dataclass_fields__)


@every_method
def test_the_original_is_untouched_and_the_result_runs(name):
    model = make_vit()
    before, problem = copy.deepcopy(model), make_problem(model)
    pruned = copy.deepcopy(QUICK[name].prune(problem))
    spent, dense = (facts.count_cost(network, (3, 8, 8)).params for network in (pruned, model))
    assert spent == problem.spent(pruned)
    assert problem.ratio - GRANULARITY[name] < spent / dense <= problem.ratio
    assert same_weights(model, before)
    assert all(parameter.grad is None for parameter in [*model.parameters(), *pruned.parameters()])
    assert all(parameter.requires_grad for parameter in pruned.parameters())
    images = next(iter(problem.batches))[0]
    assert model(images).equal(before(images)) and not pruned.training
    assert pruned(images).shape == (8, 4) and pruned(images).isfinite().all()
    pruned(images).sum().backward()  # it can be finetuned


@every_method
def test_plain_networks_and_a_budget_of_flops(name):
    arguments = {"qkv_bias": False, "global_pool": "avg", "class_token": False, "depth": 1}
    problem = make_problem(make_vit("vit_tiny_patch16_224", **arguments), cost="flops")
    pruned = QUICK[name].prune(problem)
    assert facts.count_cost(pruned, (3, 8, 8)).flops <= problem.budget
    assert pruned(next(iter(problem.batches))[0]).isfinite().all()


@every_method
def test_a_budget_out_of_reach(name):
    refuses(r"use a (larger ratio|ratio above)", QUICK[name].prune, make_problem(make_vit(depth=1), ratio=0.001))
    refuses(r"must lie in \(0, 1\], got 0", make_problem, ratio=0)


test_networks_that_cannot_be_pruned = refused(
    (lambda: timm.create_model("test_resnet"), "this is a ResNet"),
    (lambda: make_vit(init_values=0.1), "this one has blocks.0.ls1.gamma"),
    (lambda: QUICK["disp_llm"].prune(make_problem()), "(this one has|block 0 of this one was changed)"),
    by=lambda model: QUICK["nvit"].prune(make_problem(model())),
    start=r"vision transformers \(vit_\*, deit_\*\).*",
)


def random_masks(model, share=0.6):
    return {gate: torch.rand(width) < share for gate, width in gate_widths(model).items()}


def test_an_indexed_network_computes_what_the_gated_one_does_with_the_weights_that_the_masks_leave():
    model, images = make_vit(), torch.randn(3, 3, 8, 8)
    masks = random_masks(model)
    with gated(model, masks):
        expected = model(images)
    small = indexed(model, masks)
    torch.testing.assert_close(small(images), expected)
    assert not model(images).allclose(expected)  # the gates are gone
    linears = [layer for layer in small.blocks.modules() if isinstance(layer, torch.nn.Linear)]
    left = remaining_weights(model, {gate: mask.float() for gate, mask in masks.items()})
    assert int(left) == sum(layer.weight.numel() for layer in linears)
    assert all(layer.weight.shape == (layer.out_features, layer.in_features) for layer in linears)


@pytest.mark.parametrize("cost", ["params", "flops"])
def test_the_target_of_the_matrices_is_that_of_the_network(cost):
    model = make_vit()
    problem = make_problem(model, ratio=0.7, cost=cost)
    masks = random_masks(model, share=0.83)
    dense = remaining_weights(model, {gate: torch.ones(len(mask)) for gate, mask in masks.items()})
    share = remaining_weights(model, {gate: mask.float() for gate, mask in masks.items()}) / dense
    spent = problem.spent(indexed(model, masks))
    # Biases and GELU go too, which the target leaves out.
    assert float(share) - target_share(problem, int(dense)) == pytest.approx((spent - problem.budget) / spent, abs=0.05)


def test_features_without_effect_are_learned_to_go():
    model = make_vit(depth=1)
    with torch.no_grad():
        model.blocks[0].mlp.fc2.weight[:, :24] = 0
        model.blocks[0].mlp.fc1.bias.copy_(torch.arange(48) / 100)  # they tell which units are left
    images = torch.randn(16, 3, 8, 8)
    loss = {"loss": lambda outputs, targets: 1e4 * (outputs - targets).square().sum()}
    problem = make_problem(model, 0.75, batches=[(images, model(images).detach())], **loss)
    pruned = DISP(num_steps=100, learning_rate=0.01).prune(problem)
    units = (pruned.blocks[0].mlp.fc1.bias.detach() * 100).round().int()
    assert (units >= 24).sum() > 1.5 * (units < 24).sum()


def test_useless_structures_go_first():
    model = make_vit(mlp_ratio=2, qkv_bias=True)
    with torch.no_grad():
        model.blocks[0].attn.proj.weight[:, 8:16] = 0  # head 1 has no effect
        model.blocks[1].attn.proj.weight[:, :8] = 0  # head 0
        for block in model.blocks:
            block.mlp.fc2.weight[:, :20] = 0
            block.mlp.fc1.bias.copy_(torch.arange(48) / 100)  # they tell which units are left
            block.attn.qkv.bias.copy_(torch.arange(72) / 100)
    pruned = Isomorphic(head_dims=0.1, round_to=1).prune(make_problem(model, ratio=0.53))
    for block, heads in zip(pruned.blocks, ([0, 2], [1, 2]), strict=True):
        rows = (block.attn.qkv.bias.detach() * 100).round().int()
        assert sorted({row % 24 // 8 for row in rows.tolist()}) == heads
        units = (block.mlp.fc1.bias.detach() * 100).round().int()
        assert len(units) <= 28 and units.min() >= 20


def narrowable():
    model = make_vit()
    for block in model.blocks:
        block.attn = NarrowAttention(block.attn)
    return model


@pytest.mark.parametrize(
    ("width", "silence"),
    [
        ("blocks.0.heads", lambda block: block.attn.proj.weight.unflatten(1, (3, 8))[:, 1]),
        ("blocks.0.key_dims", lambda block: block.attn.qkv.weight[:24].unflatten(0, (3, 8))[:, 1]),
        ("blocks.0.value_dims", lambda block: block.attn.proj.weight.unflatten(1, (3, 8))[:, :, 1]),
        ("blocks.0.hidden", lambda block: block.mlp.fc2.weight[:, 1]),
    ],
)
def test_units_without_effect_can_go(width, silence):
    """They have the least importance, and without them the network computes what it did."""
    model = narrowable()
    with torch.no_grad():
        silence(model.blocks[0]).zero_()
        if width.endswith("key_dims"):  # the bias of the query is what is left of it
            model.blocks[0].attn.qkv.bias[:24].unflatten(0, (3, 8))[:, 1] = 0
    images, labels = image_batches([8], dtype=torch.float32)[0]
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    widths = widths_of(model)
    scores = importance(model, widths)[width]
    kept = {name: torch.ones(each.size, dtype=torch.bool) for name, each in widths.items()}
    kept[width][1] = False
    if not width.endswith("key_dims"):  # the keys that no query meets still have no gradient of their own
        assert scores.argmin() == 1
    torch.testing.assert_close(without(model, widths, kept)(images), model(images))


def exact_timer(statement, globals, num_threads):
    """A stopwatch for blocks that take a second for each of their multiplications, or so."""
    block, embedding = globals["block"], globals["inputs"].shape[-1]
    attention = block.attn
    features = block.mlp.fc1.out_features + 2 * attention.num_heads * (attention.key_dim + attention.value_dim)
    seconds = embedding * features + attention.num_heads * attention.key_dim
    return SimpleNamespace(blocked_autorange=lambda min_run_time: SimpleNamespace(median=seconds))


def test_block_times_are_linear_between_measurements(monkeypatch):
    monkeypatch.setattr(nvit, "Timer", exact_timer)
    model = narrowable()
    saved = nvit.BlockTimes(model, 4, 6).savings(widths_of(model))
    assert saved["blocks.1.hidden"] == pytest.approx(24)
    assert saved["blocks.0.heads"] == pytest.approx(24 * 32 + 8)
    assert saved["embedding"] == pytest.approx(2 * (48 + 3 * 32))
