"""Facts that the network or its data are asked for: whose rows a layer gets, what data reach, which labels count."""

from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import facts
from facts.cost.count import count_flops
from facts.moments.losses import DIVERGENCES, SampledLabels, summed_binary_cross_entropy, summed_squared_error
from facts.parts.base import USED_ELSEWHERE
from facts.parts.layers import NOT_PER_SAMPLE
from tests.networks import make_vit
from tests.refusals import refused, refuses
from tests.toys import Net

QUICK = {"estimator": "kfac_reduce", "search": "uniform", "form": "plain", "ratio": 0.5}
UNITS = {"estimator": "kfac_reduce", "search": "uniform", "parts": "units", "ratio": 0.5}


class Rows(nn.Module):
    """Tokens `[N, 4, 12]`, as rows sample by sample, or token by token, flat or not."""

    def __init__(self, by_token, flat=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.out = (nn.Linear(12, 12) for _ in range(3))
        self.by_token, self.flat = by_token, flat

    def forward(self, x):
        rows = x.transpose(0, 1) if self.by_token else x
        shape = rows.shape[:2]
        rows = torch.relu(self.first(rows.flatten(0, 1) if self.flat else rows))
        rows = rows.unflatten(0, shape) if self.flat else rows
        x = rows.transpose(0, 1) if self.by_token else rows
        return self.out(torch.relu(self.second(torch.softmax(x @ x.mT, -1) @ x)).mean(1))


class Experts(nn.Module):
    """Tokens `[N, 4, 12]`, each for one of three experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12)) for _ in range(3))
        self.first, self.out = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x):
        x = self.first(x)
        chosen, mixed = x[..., 0].abs().long(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                mixed[chosen == number] = expert(x[chosen == number])
        return self.out(mixed.mean(1))


def batches(*shape, size=8, num=3, labels=True):
    torch.manual_seed(1)
    found = [(torch.randn(size, *shape), torch.randint(4, (size,))) for _ in range(num)]
    return found if labels else [inputs for inputs, _ in found]


class Sorted(Rows):
    def forward(self, x):
        order = x[..., 0].flatten().argsort()
        rows = torch.relu(self.first(x.flatten(0, 1)[order]))
        return self.out(torch.relu(self.second(rows[order.argsort()].unflatten(0, x.shape[:2]))).mean(1))


@pytest.mark.parametrize("first", [8, 1])
@pytest.mark.parametrize(
    ("model", "left"),
    [
        (Rows(by_token=False), set()),
        (Rows(by_token=True), {"first"}),
        (Rows(by_token=True, flat=False), {"first"}),
        (Sorted(by_token=False), {"first"}),
        (Experts(), {f"experts.{number}.{layer}" for number in range(3) for layer in (0, 2)}),
    ],
)
def test_layers_that_see_samples_in_turns_stay_dense(model, left, first):
    """Also if the first batch is of one sample, which does not show it."""
    data = batches(4, 12, size=first, num=1, labels=False) + batches(4, 12, num=2, labels=False)
    prepared = facts.prepare(model, data, layers="*", outputs="features")
    reasons = {name for name, reason in prepared.skipped.items() if reason == NOT_PER_SAMPLE}
    assert reasons == left and facts.compress(prepared, ratio=0.5).plan.keys() == prepared.parts.keys()
    if left:
        message = "cannot be compressed: its inputs are not one sample after the other"
        refuses(message, facts.prepare, model, data, layers=[*left])


def using(use, last=lambda outputs: outputs):
    """A ViT that uses what its blocks hold."""

    def run(net, images):
        x = net.net._pos_embed(net.net.patch_embed(images))
        for block in net.net.blocks:
            x = use(block, block(x))
        return last(net.net.forward_head(net.net.norm(x)))

    return Net(run, net=make_vit(depth=2, dtype=torch.float32))


@pytest.mark.parametrize(
    ("use", "lost"),
    [
        (lambda block, x: x + 1, set()),
        (lambda block, x: x + x.flip(-1) * block.mlp.fc1(x).sum(-1, keepdim=True), {"mlp"}),
        (lambda block, x: x + x.flip(-1) * block.mlp.fc1.weight.norm(), {"mlp"}),
        (lambda block, x: x + x.flip(-1) * block.attn.qkv(x).sum(-1, keepdim=True), {"attn.scores", "attn.outputs"}),
        (lambda block, x: x.mul_(0.5), set()),  # what is changed in place reaches the next block
    ],
)
def test_what_other_code_sees_or_changes_is_no_unit(use, lost):
    prepared = facts.prepare(using(use), batches(3, 16, 16), parts=("units", "tokens"))
    units = {"mlp", "attn.scores", "attn.outputs", "tokens"}
    assert {name for name in units if f"net.blocks.0.{name}" in prepared.parts} == units - lost
    assert (USED_ELSEWHERE in prepared.skipped.values()) == bool(lost)


def test_units_are_found_in_half_precision_behind_outputs_in_float32():
    network = using(lambda block, x: x, torch.Tensor.float)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)  # or no block would matter
    network.bfloat16()
    prepared = facts.prepare(network, [(x.bfloat16(), y) for x, y in batches(3, 16, 16)], parts="units")
    assert len(prepared.units) == 6, prepared.skipped


def beside(first):
    """The first parameter says nothing about the others; a layer's sizes are those before it was cut."""
    rows = Rows(False)
    rows.first.in_features = rows.second.out_features = 99
    first = nn.Parameter(first, requires_grad=False)
    return Net(lambda net, x: net.rows(x + net.first.float().mean()), first=first, rows=rows)


@pytest.mark.parametrize("first", [torch.arange(3), torch.ones(3).half(), torch.ones(1).bfloat16()])
def test_types_and_sizes_are_those_of_most_weights(first):
    result = facts.compress(beside(first), data := batches(4, 12), **QUICK)
    assert result.summary.before.flops == 2 * 4 * (2 * 12 * 12) + 2 * 12 * 12
    assert facts.recover(result, data, epochs=1).model(torch.randn(2, 4, 12)).isfinite().all()
    assert count_flops(beside(first), torch.empty(1, 4, 12, device="meta"), "paper") == result.summary.before.flops


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda net, x: F.dropout(net.rows(x)), "gives other outputs for .* in evaluation mode, .* training mode only"),
        (lambda net, x: net.rows(x.mul_(0.5)), "changes its inputs in place, .*: let it change a clone of them"),
    ],
)
def test_a_network_whose_calls_differ_is_refused(run, reason):
    data, given = batches(4, 12), batches(4, 12)
    refuses(f"Net {reason}", facts.compress, Net(run, rows=Rows(False)), data, **QUICK)
    assert all(x.equal(before) for (x, _), (before, _) in zip(data, given, strict=True))


def test_labels_that_do_not_count(caplog):
    ignored = [(x, torch.full_like(y, -100)) for x, y in batches(4, 12)]
    message = "none of the 24 samples has a label that counts, all are -100"
    refuses(message, facts.compress, Rows(False), ignored, **QUICK)
    facts.compress(Rows(False), [*ignored, *batches(4, 12, num=1)], **QUICK)
    assert "only 8 of 32 samples have a label that counts" in caplog.text


class One(Rows):
    """One output of each sample, `[N, 1]` or `[N]`."""

    def forward(self, x):
        return super().forward(x)[:, 0] if self.flat else super().forward(x)[:, :1]


@pytest.mark.parametrize(
    ("labels", "loss", "is_class", "flat"),
    [
        (lambda y: y * 0.5, summed_squared_error, False, False),
        (lambda y: (y * 0.5)[:, None], summed_squared_error, False, True),
        (lambda y: y % 2, summed_binary_cross_entropy, True, True),
        (lambda y: y > 1, summed_binary_cross_entropy, True, False),
    ],
)
def test_labels_of_one_output_are_used(labels, loss, is_class, flat):
    data = [(x, labels(y)) for x, y in batches(4, 12)]
    prepared = facts.prepare(One(False, flat), data)
    assert prepared.loss is loss and (prepared.output_error in DIVERGENCES) == is_class
    results = [facts.compress(One(False, flat), data, ratio=ratio) for ratio in (0.4, 0.9)]
    distances = [result.summary.distance for result in results]
    assert 0 < distances[1].mean < distances[0].mean and 0 < distances[1].share < 1
    loaded = replace(results[0], output_error=None)  # as of a folder
    assert facts.recover(loaded, data, epochs=1).summary.recovery.before == pytest.approx(distances[0].mean, rel=0.1)


test_labels_that_do_not_fit_one_output = refused(
    (lambda y: y, "labels of yes or no must lie in 0 .. 1, got 0 to 3: with one output"),
    (lambda y: torch.zeros(8, 2), r"labels that are float32 \[6, 2\] do not fit outputs that are float32 \[6\]"),
    by=lambda labels: facts.compress(One(False), [(x, labels(y)) for x, y in batches(4, 12)], **QUICK),
)


@pytest.mark.parametrize("loss", [summed_squared_error, summed_binary_cross_entropy])
def test_drawn_labels_of_one_output_follow_the_network(loss):
    """The variance of the slope of a Gaussian is 1, of a logit p (1 - p)."""
    outputs = torch.full((40000, 1), 0.7, requires_grad=True)
    (slopes,) = torch.autograd.grad(SampledLabels(loss)(outputs, None), outputs)
    p = torch.tensor(0.7).sigmoid().item()
    assert slopes.mean().abs() < 0.02
    assert slopes.var().item() == pytest.approx(1 if loss is summed_squared_error else p * (1 - p), rel=0.05)


@pytest.mark.parametrize("settings", [QUICK, UNITS])
@pytest.mark.parametrize("trained", [("qkv.bias", "proj.weight", "fc1.weight"), ()])
def test_what_is_trained_stays_so(trained, settings):
    model = make_vit(depth=1, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith(trained)
    result = facts.compress(model, batches(3, 16, 16), **settings).model
    assert all(each.requires_grad == name.endswith(trained) for name, each in model.named_parameters())
    places = [name.replace(".left", ".weight").replace(".right", ".weight") for name, _ in result.named_parameters()]
    assert [each.requires_grad for each in result.parameters()] == [name.endswith(trained) for name in places]


@pytest.mark.parametrize("parts", ["layers", "units", "units,tokens"])
def test_a_network_runs_at_most_four_times_before_the_first_gradient(parts):
    """On the first sample, and several; for units, with two changes of the network that should not matter."""
    runs, model = [], timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=10).eval()
    model.register_forward_pre_hook(lambda module, args: runs.append(len(args[0])) if not args[0].is_meta else None)
    facts.prepare(model, [torch.randn(4, 3, 32, 32) for _ in range(3)], parts=parts)
    assert runs == [1, 5, *([1, 1] if parts != "layers" else [])]
