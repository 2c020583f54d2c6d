"""One data pass: what it sees, sums and keeps."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import facts
from facts.estimators import GFWSVD
from facts.moments import GradGram, InputGram, SampleGradEnergy, collect_moments
from facts.moments import batch as of_layer
from facts.moments.batch import LayerBatch, add_symmetric, mirror, split_samples
from facts.moments.data_pass import DataPass
from facts.moments.losses import summed_cross_entropy
from facts.parts.layers import select_layers
from facts.utils.cache import Cache
from tests.by_sample import BY_SAMPLE, EVERY, assert_same_factors, factors_of
from tests.devices.pretended import pretended_cuda, values_of
from tests.disk import room_for
from tests.networks import Runs, image_batches, make_causal_lm, make_model, make_vit, relative_error
from tests.toys import Net, linears

X, LABELS = torch.randn(3, 4, 12, dtype=torch.float64), torch.tensor([0, 1, 2])
EXACT = 1e-12  # sums over float64 in another order


def in_place(net, x):
    """Change the input and the output of a layer after it ran, as residual and activation code may do."""
    x = net.first(x)
    x += torch.relu_(net.layer(x))
    return x.mean(dim=1)


@pytest.mark.parametrize("with_grads", [True, False])
def test_changes_in_place_do_not_reach_the_moments(with_grads):
    model = Net(in_place, **linears("first", "layer")).double()
    wanted = [InputGram(), GradGram()] if with_grads else [InputGram()]
    moments = collect_moments(model, {"layer": model.layer}, [(X, LABELS)], wanted)["layer"]
    hidden = model.first(X).detach()
    inputs = hidden.flatten(0, 1)
    torch.testing.assert_close(moments[InputGram()][0], inputs.T @ inputs)
    if with_grads:
        y = model.layer(hidden).detach().requires_grad_()
        (g,) = torch.autograd.grad(summed_cross_entropy((hidden + y.relu()).mean(dim=1), LABELS), y)
        torch.testing.assert_close(moments[GradGram()][0], g.flatten(0, 1).T @ g.flatten(0, 1))


def test_the_model_is_as_it_was_after_an_error():
    model = make_model().train()
    model.grid.eval()
    model.head.bias.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]

    def interrupted(outputs, targets):
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())
        raise KeyboardInterrupt

    data_pass = DataPass(model, select_layers(model).layers, lambda *_: None, interrupted, torch.float32, True)
    with pytest.raises(KeyboardInterrupt):
        data_pass.run(image_batches([2]), "calibration")
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("shape", [(7, 4, 5), (5,)])
def test_split_samples_names_the_layer_it_cannot_split(shape):
    with pytest.raises(ValueError, match=r"layer blocks\.0 sees a tensor of shape .* for a batch of 2 samples"):
        split_samples(torch.zeros(shape), 2, "blocks.0")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("size", [7, of_layer.MIN_BLOCKED_SIZE, 1029, of_layer.MIN_BLOCKED_SIZE_ON_GPU])
def test_blocked_product_is_the_plain_product(size, device):
    x = torch.randn(3, 5, size, dtype=torch.float64)
    weights = torch.rand(3, 5, dtype=torch.float64)
    start = torch.randn(size + 1, size + 1, dtype=torch.float64)
    start = start + start.T
    with pretended_cuda():
        total, batch = start.clone().to(device), LayerBatch(x.to(device), None).with_one()
        add_symmetric(total, batch.x, batch.x, weights.to(device))
        found = values_of(mirror(total)).cpu()
    with_one = F.pad(x, (0, 1), value=1)
    expected = start + torch.einsum("nt,nti,ntj->ij", weights, with_one, with_one)
    assert relative_error(found, expected) < 1e-13  # float64 sums in another order


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [2, 5]])
def test_splitting_batches_changes_nothing(model, sizes):
    estimators = {**BY_SAMPLE, "gfwsvd in groups": GFWSVD(group_size=2)}
    assert_same_factors(*(factors_of(model, image_batches(each), estimators) for each in (sizes, [3, 3, 1])))


def test_one_pass_serves_every_estimator(model, batches):
    runs = Runs(model)
    together = factors_of(model, batches, EVERY)
    assert runs.number == len(batches)
    for name, estimator in EVERY.items():
        alone = factors_of(model, batches, {name: estimator})
        assert_same_factors({place: together[place] for place in alone}, alone)


def test_a_call_without_influence_has_gradient_zero():
    model = Net(lambda net, x: (net.layer(x).mean(dim=1), net.layer(2 * x))[0], **linears("layer")).double()
    moments = collect_moments(model, {"layer": model.layer}, [(X, LABELS)], [InputGram(), GradGram()])["layer"]
    flat = X.flatten(0, 1)
    assert moments.num_tokens == 24 and relative_error(moments[InputGram()][0], 5 * flat.T @ flat) < EXACT
    outputs = model.layer(X).detach().requires_grad_()
    (g,) = torch.autograd.grad(summed_cross_entropy(outputs.mean(dim=1), LABELS), outputs)
    assert relative_error(moments[GradGram()][0], g.flatten(0, 1).T @ g.flatten(0, 1)) < EXACT


@pytest.mark.parametrize("name", ["facts", "kfac_expand", "kfac_reduce", "shampoo2"])
def test_gradients_that_are_zero_in_most_samples_are_clipped_to_zero(name):
    x, g = torch.randn(5, 3, 4), torch.randn(5, 3, 2)
    g[:3] = 0
    factors = facts.estimate_factors(name, x, g)
    assert not factors.B.any() and factors.A.isfinite().all()


@pytest.mark.parametrize("grouped", [False, True])
def test_heads_in_one_call_have_the_moments_of_heads_in_turn(grouped):
    tokens = torch.randint(64, (5, 9), generator=torch.Generator().manual_seed(0))
    texts = [(part, facts.next_tokens(part)) for part in tokens.split([3, 2])]
    model = make_causal_lm("llama") if grouped else make_vit(depth=1)
    batches = texts if grouped else image_batches([3, 2], shape=(3, 16, 16))
    prepared = facts.prepare(model, batches, held_out=(), parts="units")
    wanted = dict.fromkeys(moment for estimator in EVERY.values() for moment in estimator.moments)
    together = prepared.moments(wanted)
    for name in (name for name in prepared.linears if ".heads." in name):
        alone = prepared.moments(wanted, [name])[name]
        for moment in wanted:
            for ours, theirs in zip(together[name][moment], alone[moment], strict=True):
                assert relative_error(ours, theirs) < EXACT, (name, moment)


@pytest.mark.attack
def test_a_moment_that_finds_no_room(model, batches, tmp_path, caplog):
    """One clear error, nothing half written, and what was finished is kept."""
    caplog.set_level("INFO")
    moments = [SampleGradEnergy(), InputGram(), GradGram()]
    collect = partial(collect_moments, model, select_layers(model).layers, batches, moments)

    def stamps():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    with room_for(4096), pytest.raises(OSError, match=r"no room for .*InputGram.*GiB are free.*: free"):
        collect(cache=Cache(tmp_path))
    kept = stamps()
    caplog.clear()
    found = collect(cache=Cache(tmp_path))
    assert "data pass for" in caplog.text and kept.items() <= stamps().items()
    for name, expected in collect(cache=None).items():
        for moment in moments:
            assert all(map(torch.equal, found[name][moment], expected[moment]))
