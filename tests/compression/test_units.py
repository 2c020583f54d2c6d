"""Units of networks of many families: exact at full width, narrower at less, with errors to second order."""

import copy
from functools import cache, partial

import pytest
import timm
import torch
from timm.layers import SwiGLU, SwiGLUPacked
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import facts
from facts.cost.count import count_params
from facts.estimators import FACTS
from facts.modules.heads import PaddedHeads
from facts.modules.networks import replaced_forwards, run
from facts.parts import part_at, put
from facts.parts.attention import NO_PRODUCTS, Heads, OutputUnit, ScoreUnit, put_heads
from facts.parts.hidden import NOT_SEPARATE, HiddenUnit
from facts.parts.layers import LayerPart
from facts.search import AllocationProblem
from facts.search.methods.comcat import Mixture
from facts.search.sensitivity_fisher import exact_profiles
from facts.search.sensitivity_measured import Sensitivity
from tests.networks import image_batches, make_causal_lm, make_image_classifier, make_swin, make_vit, relative_error
from tests.refusals import refused
from tests.toys import Net

EXACT = 1e-10  # float64
ATTENTION = {ScoreUnit, OutputUnit}
ALL = {*ATTENTION, HiddenUnit}
EVA = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 2}
PVT = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32), "num_heads": (1, 2, 2, 4)}


def encoder():
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
    modules = {"embed": nn.Conv2d(3, 16, 4, stride=4), "encoder": layers, "head": nn.Linear(16, 4)}
    return Net(lambda net, x: net.head(net.encoder(net.embed(x).flatten(2).mT).mean(dim=1)), **modules).double()


def vit(**settings):
    sizes = {"img_size": 16, "patch_size": 4, "num_classes": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return VisionTransformer(**sizes, **settings).double()


def convnext():
    return timm.models.ConvNeXt(num_classes=4, depths=(1,) * 4, dims=(12,) * 4, ls_init_value=0.5).double()


def of_timm(tag, **arguments):
    return timm.create_model(tag, num_classes=4, **arguments).double()


# The network, the size of its images (None: it reads tokens), and the kinds of its parts.
FAMILIES = {
    "vit": (vit, 16, ALL),
    "without biases": (partial(vit, qkv_bias=False, proj_bias=False), 16, ALL),
    "swiglu": (partial(vit, mlp_layer=SwiGLU), 16, ALL),
    "packed swiglu": (partial(vit, mlp_layer=SwiGLUPacked), 16, ALL),
    "norms of queries": (partial(vit, qk_norm=True), 16, {LayerPart, HiddenUnit}),
    "norm of attention": (partial(vit, scale_attn_norm=True), 16, {LayerPart, HiddenUnit}),
    "norm of hidden units": (partial(vit, scale_mlp_norm=True), 16, {*ATTENTION, LayerPart}),
    "swin": (make_swin, 16, ALL),
    "convnext": (convnext, 32, {HiddenUnit}),
    "eva": (partial(of_timm, "eva02_tiny_patch14_224", **EVA), 32, {LayerPart, HiddenUnit}),
    "pvt": (partial(of_timm, "pvt_v2_b0", **PVT), 32, {LayerPart}),
    "pytorch": (encoder, 16, ALL),
    "transformers, vit": (lambda: make_image_classifier().double(), 32, ALL),
    "transformers, swin": (lambda: make_image_classifier("swin").double(), 32, ALL),
    "grouped queries, rotated": (partial(make_causal_lm, "qwen2"), None, {LayerPart, OutputUnit, HiddenUnit}),
    "grouped queries, normed and rotated": (make_causal_lm, None, {LayerPart, OutputUnit, HiddenUnit}),
}


@cache
def prepared(name):
    make, size, _ = FAMILIES[name]
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():  # biases and tables that are not zero
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    tokens = torch.randint(64, (8, 7), generator=torch.Generator().manual_seed(0))
    data = image_batches([6, 6], shape=(3, size, size)) if size else [(tokens, facts.next_tokens(tokens))]
    return facts.prepare(model, data, parts="units", held_out=())


def images_of(calibration):
    return torch.cat([images for images, _ in calibration.data])


@cache
def problem_of(name):
    calibration = prepared(name)
    estimator = calibration.resolve_defaults(FACTS())
    found, half = calibration.decompositions(estimator), {"flops": 0.5}
    return AllocationProblem(calibration, estimator, found, half, sensitivity=calibration.data)


@pytest.mark.parametrize("name", FAMILIES)
def test_narrow_modules_compute_what_truncated_calls_do_and_at_full_width_what_the_original_does(name):
    """At half of its width, each part has lost the weights of the plan. 1e-10 covers ill-conditioned factors."""
    problem = problem_of(name)
    calibration, images = problem.prepared, images_of(problem.prepared)
    assert {type(part) for part in problem.parts.values()} == FAMILIES[name][2]
    whole = calibration.apply({name: part.largest for name, part in problem.parts.items()}, problem.decompositions)
    for network in (calibration.rewritten, whole):
        assert relative_error(run(network, images), run(calibration.model, images)) < EXACT
    plan = {name: max(1, part.largest // 2) for name, part in problem.parts.items()}
    narrow = calibration.apply(plan, problem.decompositions)
    sensitivity, calls = Sensitivity(problem), {}
    for part, rank in plan.items():
        calls |= {call: sensitivity._truncated(call, rank) for call in problem.parts[part].linears}
    with replaced_forwards({calibration.rewritten.get_submodule(call): each.forward for call, each in calls.items()}):
        expected = run(calibration.rewritten, images)
    assert relative_error(run(narrow, images), expected) < EXACT
    assert relative_error(expected, run(calibration.model, images)) > 1e-6
    alone = calibration.apply(plan | dict.fromkeys(plan.keys() - calibration.units), problem.decompositions)
    dense, weights = (
        sum(module.weight.numel() for module in network.modules() if isinstance(module, nn.Linear))
        for network in (calibration.model, alone)
    )
    parts = [(problem.parts[name], plan[name]) for name in calibration.units]
    assert dense - weights == sum(part.dense - part.num_weights(rank) for part, rank in parts)


@pytest.mark.parametrize("name", ["vit", "norm of hidden units", "grouped queries, rotated"])
def test_comcats_mixture_of_one_choice_is_that_choice(name):
    """Each part at its second rank, and each as it is."""
    problem = problem_of(name)
    images, ranks = images_of(problem.prepared), problem.ranks_of_ratios((0.3, 0.6, 0.9))
    mixtures = [Mixture(problem, part, ranks[part]) for part in problem.parts]
    for choice, plan in ((1, {part: ranks[part][1] for part in ranks}), (-1, dict.fromkeys(ranks))):
        for mixture in mixtures:
            mixture.shares = torch.zeros_like(mixture.logits)
            mixture.shares[choice] = 1
        with replaced_forwards({call: own for mixture in mixtures for call, own in mixture.forwards().items()}):
            found = run(problem.prepared.rewritten, images)
        assert relative_error(found, run(problem.prepared.apply(plan, problem.decompositions), images)) < EXACT


@pytest.mark.parametrize("name", ["vit", "swin", "convnext", "packed swiglu", "grouped queries, rotated"])
def test_parts_are_timed_in_networks_that_run(name):
    """Each is put into a copy of the network at the ranks to be measured; the modules' times are divided whole."""
    calibration = prepared(name)
    for level in (0, 2):
        network = copy.deepcopy(calibration.model)
        put(network, calibration.parts, {each: part.timed_ranks[level] for each, part in calibration.parts.items()})
        assert run(network, images_of(calibration)).isfinite().all()
        assert count_params(network) < calibration.cost.params
    shares = calibration.latency_table(2).shares
    for owner in {part.owner for part in calibration.parts.values()}:
        assert sum(shares[each] for each, part in calibration.parts.items() if part.owner == owner) == 1


@pytest.mark.parametrize("name", ["vit", "convnext", "grouped queries, rotated"])
def test_the_profile_is_that_of_the_slopes_of_each_samples_loss(name):
    """½ mean (∂/∂ε of the loss, with all calls of a unit moved by ε towards their rank)²."""
    problem = problem_of(name)
    network, calls, sensitivity = problem.prepared.rewritten, problem.prepared.linears, Sensitivity(problem)
    profiles = exact_profiles(problem, "given", seed=0)
    for name, part in problem.parts.items():
        rank = part.largest // 2
        small = {call: sensitivity._truncated(call, rank) for call in part.linears}
        slopes = []
        for images, labels in problem.prepared.data:
            for image, label in zip(images, labels, strict=True):
                step = torch.zeros((), dtype=torch.float64, requires_grad=True)
                forwards = {calls[call]: moved(calls[call].forward, each, step) for call, each in small.items()}
                with replaced_forwards(forwards):
                    loss = problem.prepared.loss(run(network, image[None]), label[None])
                slopes.append(torch.autograd.grad(loss, step)[0])
        expected = 0.5 * torch.stack(slopes).square().mean()
        torch.testing.assert_close(profiles[name][rank], expected, rtol=1e-7, atol=1e-12 * profiles[name][0].item())


def moved(forward, other, step):
    return lambda x: torch.lerp(forward(x), other(x), step)


def test_layers_that_are_in_no_unit_say_why():
    calibration = prepared("norms of queries")
    assert calibration.skipped["blocks.0.attn.qkv"] == NO_PRODUCTS
    assert "compressed as layers: blocks.0.attn.qkv" in repr(facts.compress(calibration, ratio=0.5))
    assert prepared("norm of hidden units").skipped["blocks.1.mlp.fc2"] == NOT_SEPARATE


@pytest.mark.parametrize("search", ["uniform", "cors", "flar"])
def test_searches_spend_a_budget_on_units(search):
    result = facts.compress(prepared("vit"), search=search, ratio=0.7)
    (spent,), (budget,) = result.summary.spent.values(), result.summary.budget.values()
    assert 0.7 * budget < spent <= budget
    assert result.summary.after == facts.count_cost(result.model, (3, 16, 16))
    full = facts.count_cost(result.model, (3, 16, 16), rule="full").flops
    assert result.summary.full_flops[1] == full < result.summary.full_flops[0]


@pytest.mark.parametrize("estimator", ["shampoo2", "gfwsvd", "svd_llm", "fwsvd", "pela"])
def test_estimators_decompose_units(estimator):
    result = facts.compress(prepared("vit"), estimator=estimator, search="uniform", ratio=0.5)
    assert set(result.plan.values()) == {4, 32}
    assert all(parameter.isfinite().all() for parameter in result.model.parameters())


@pytest.mark.parametrize(("scores", "outputs"), [(3, 8), (8, 3), (5, 5)])
@torch.no_grad()
def test_heads_of_two_widths_are_padded_and_read_again(scores, outputs):
    attention, x = make_vit().blocks[0].attn.eval(), torch.randn(2, 5, 16, dtype=torch.float64)
    model = nn.ModuleDict({"attention": attention})
    for kind, width in (("scores", scores), ("outputs", outputs)):
        part_at(model, f"attention.{kind}", "units").put(model, width)
    heads = Heads.of(attention)
    for tensor in (heads.queries, heads.keys, heads.values, heads.outputs, heads.query_bias, heads.output_bias):
        tensor.normal_()  # in place: they are views
    assert isinstance(attention.qkv, nn.Linear if scores == outputs else PaddedHeads)
    s = torch.einsum("ntd,hrd,hre,nse->nhts", x, heads.queries, heads.keys, x) * heads.scale
    s += torch.einsum("hr,hre,nse->nhs", heads.query_bias, heads.keys, x)[:, :, None] * heads.scale
    mixed = s.softmax(dim=-1) @ torch.einsum("nsd,hrd->nhsr", x, heads.values)
    expected = torch.einsum("nhtr,hdr->ntd", mixed, heads.outputs) + heads.output_bias
    again = copy.deepcopy(attention)
    put_heads(again, Heads.of(again))
    for network, fused in ((attention, True), (attention, False), (again, again.fused_attn)):
        network.fused_attn = fused
        torch.testing.assert_close(network(x), expected)


def test_mlps_of_convolutions_are_narrowed_and_saved(tmp_path):
    model = of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 24, 32, 48), conv_mlp=True).eval()
    result = facts.compress(model, image_batches([8, 8], shape=(3, 32, 32)), ratio=0.5)
    assert "stages.0.blocks.0.mlp" in result.summary.widths
    assert type(result.model.stages[0].blocks[0].mlp.fc1) is nn.Conv2d
    facts.save_compressed(result, tmp_path)
    loaded, images = facts.load_compressed(tmp_path, copy.deepcopy(model)), torch.randn(2, 3, 32, 32).double()
    assert loaded.model(images).equal(result.model(images))


test_what_works_on_layers_alone_refuses_units = refused(
    (lambda: facts.compress(prepared("vit"), ratio=0.5, search="svd_llm_v2"), "this works on single layers"),
    (lambda: facts.prepare(make_vit(), parts="units"), "units are found by running the network: give calibration data"),
)
