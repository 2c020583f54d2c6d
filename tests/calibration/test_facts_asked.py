"""Facts that the network or its data are asked for: whose rows a layer gets, what data reach, which labels count."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import facts
from tests.networks import make_vit

QUICK = {"estimator": "kfac_reduce", "search": "uniform", "form": "plain", "ratio": 0.5}
UNITS = {"estimator": "kfac_reduce", "search": "uniform", "parts": "units", "ratio": 0.5}


class Rows(nn.Module):
    """Tokens `[N, 4, 12]`, as rows sample by sample, or token by token."""

    def __init__(self, by_token):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.out, self.by_token = *(nn.Linear(12, 12) for _ in range(3)), by_token

    def forward(self, x):
        rows = x.transpose(0, 1) if self.by_token else x
        rows = torch.relu(self.first(rows.flatten(0, 1))).unflatten(0, rows.shape[:2])
        x = rows.transpose(0, 1) if self.by_token else rows
        return self.out(torch.relu(self.second(torch.softmax(x @ x.mT, -1) @ x)).mean(1))


class Experts(nn.Module):
    """Vectors `[N, 12]`, each for one of three experts; the last reads no sample of the first two batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12)) for _ in range(3))
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        chosen, mixed = x[:, 0].long(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                mixed[chosen == number] = expert(x[chosen == number])
        return self.out(mixed)


class Noisy(Rows):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5)


def batches(*shape, size=8, num=3, labels=True):
    torch.manual_seed(1)
    found = [(torch.randn(size, *shape), torch.randint(4, (size,))) for _ in range(num)]
    return found if labels else [inputs for inputs, _ in found]


def test_the_order_of_rows_does_not_matter():
    """Rows in turns are told apart in batches of one sample, whatever the data's batches."""
    whole = batches(4, 12)
    single = [(x[None], y[None]) for batch in whole for x, y in zip(*batch, strict=True)]
    first, other = (facts.compress(Rows(by), data, **QUICK) for by, data in ((False, single), (True, whole)))
    assert first.plan == other.plan and {*first.plan} == {"first", "second"}
    x = torch.randn(3, 4, 12)
    torch.testing.assert_close(first.model(x), other.model(x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize(("settings", "num"), [(QUICK, 6), (UNITS, 3)])
def test_experts_that_the_data_reach_are_compressed(size, settings, num):
    data = torch.randn(48, 12)
    data[:, 0] = torch.arange(48) // 8 % 3 + 0.5
    pairs = list(zip(data.split(size), torch.randint(4, (48,)).split(size), strict=True))
    result = facts.compress(Experts(), pairs, **settings)
    assert len([name for name in result.plan if name.startswith("experts")]) == num, result.skipped


def test_a_network_that_draws_random_numbers_is_refused():
    with pytest.raises(ValueError, match=r"Noisy draws random numbers in evaluation mode, .*: draw them in training"):
        facts.compress(Noisy(False), batches(4, 12), **QUICK)


def test_labels_that_do_not_count(caplog):
    ignored = [(x, torch.full_like(y, -100)) for x, y in batches(4, 12)]
    with pytest.raises(ValueError, match="none of the 24 samples has a label that counts, all are -100"):
        facts.compress(Rows(False), ignored, **QUICK)
    facts.compress(Rows(False), [*ignored, *batches(4, 12, num=1)], **QUICK)
    assert "only 8 of 32 samples have a label that counts" in caplog.text


def test_one_output_needs_a_loss():
    model, data = make_vit(dtype=torch.float32), batches(3, 16, 16)
    model.reset_classifier(1)
    with pytest.raises(ValueError, match="has one output, whose cross-entropy is zero for all labels: give loss="):
        facts.compress(model, [(x, 0 * y) for x, y in data], **QUICK)


def test_names_come_before_patterns():
    model = nn.Sequential(OrderedDict({"e[0]": nn.Linear(12, 12), "e0": nn.Linear(12, 12), "out": nn.Linear(12, 4)}))
    assert list(facts.compress(model, batches(12), layers=["e[0]"], **QUICK).plan) == ["e[0]"]


@pytest.mark.parametrize("settings", [QUICK, UNITS])
@pytest.mark.parametrize("trained", ["qkv.bias", "qkv", "weight", "proj", "fc1.weight", "nothing"])
def test_what_is_trained_stays_so(trained, settings):
    model = make_vit(dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = trained in name
    result = facts.compress(model, batches(3, 16, 16), **settings).model
    assert all(each.requires_grad == (trained in name) for name, each in model.named_parameters())
    places = [name.replace(".left", ".weight").replace(".right", ".weight") for name, _ in result.named_parameters()]
    assert [each.requires_grad for each in result.parameters()] == [trained in name for name in places]


def test_compiled_networks_are_those_that_were_compiled():
    data = batches(3, 16, 16)
    plain, other = make_vit(dtype=torch.float32), make_vit(dtype=torch.float32)
    other.compile(backend="eager")
    results = [facts.compress(each, data, **UNITS) for each in (plain, torch.compile(plain, backend="eager"), other)]
    assert results[0].plan == results[1].plan == results[2].plan and len(results[0].plan) > 4
    x = torch.randn(2, 3, 16, 16)
    assert all(torch.equal(each.model(x), results[0].model(x)) for each in results)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_results_that_modules_keep_are_no_obstacle():
    class Keeping(Rows):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    model = Keeping(False)
    nn.utils.weight_norm(model.second)
    model(torch.randn(2, 4, 12)).sum().backward()
    assert facts.compress(model, batches(4, 12), **QUICK).plan["first"]
