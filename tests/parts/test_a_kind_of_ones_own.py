"""A kind of part from outside the package: channels of a gate, whose cost depends on the part before it."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import facts
from facts.decomposition.truncation import decompose
from facts.parts import KINDS
from facts.parts.base import Found, Kind, Part, Unit, computes_the_same, module_at
from tests.networks import image_batches

WIDTH = 12


class Gate(nn.Module):
    """x + down(tanh(up(x))): it can be as narrow as one likes, but is found only by `ToyKind`."""

    def __init__(self):
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(12, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 12)

    def forward(self, x):
        return x + self.down(self.middle(self.up(x)))


@dataclass(frozen=True)
class Channels(Unit):
    """The leading channels of a gate. A gate is free if the one before it is as narrow as can be."""

    def flops(self, rank, plan):
        is_second = self.name.endswith("1")
        return 0 if is_second and plan.get("gates.0") == 1 else super().flops(rank, plan)

    def decompose(self, linear, factors, row, col):
        return decompose(linear.weight.detach(), factors, shrinkage_row=row, shrinkage_col=col)

    def put(self, model, rank, weights=None):
        gate = model.get_submodule(self.owner)
        up, down = (nn.Linear(*sizes).to(gate.up.weight) for sizes in ((12, rank), (rank, 12)))
        if weights is not None:
            up.load_state_dict({"weight": gate.up.weight[:rank], "bias": gate.up.bias[:rank]})
            down.load_state_dict({"weight": gate.down.weight[:, :rank], "bias": gate.down.bias})
        gate.up, gate.down = up, down


def in_another_order(gate):
    for parameter, axis in ((gate.up.weight, 0), (gate.up.bias, 0), (gate.down.weight, 1)):
        parameter.copy_(parameter.flip(axis))


class ToyKind(Kind):
    def layers_of(self, owner, module):
        return [f"{owner}.up", f"{owner}.down"] if isinstance(module, Gate) else None

    def find(self, model, owner, call):
        part = self.at(model, owner)
        same = computes_the_same(model.get_submodule(owner), call, lambda gate: None, in_another_order)
        return Found((part,)) if same else Found(reasons=dict.fromkeys(part.layers, "the gate computes something else"))

    def at(self, model, name) -> Part | None:
        gate = module_at(model, name)
        if not isinstance(gate, Gate):
            return None
        layers, width = (f"{name}.up", f"{name}.down"), gate.down.in_features
        return Channels(name, name, layers, layers[1:], 24 * width, width=width, dense_width=width)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates, self.head = nn.ModuleList([Gate(), Gate()]), nn.Linear(12, 12)

    def forward(self, images):
        for gate in self.gates:
            images = gate(images)
        return self.head(images)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(KINDS, "toy", (ToyKind(),))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Network().double().eval()


@pytest.fixture
def prepared(model):
    return facts.prepare(model, image_batches([16, 16], shape=(12,)), parts="toy")


def test_it_is_found_compressed_and_cut(prepared, tmp_path):
    assert [*prepared.parts] == ["gates.0", "gates.1"]
    result = facts.compress(prepared, ratio=0.5, search="uniform", budget=facts.Budget(rounds=()))
    assert result.plan == {"gates.0": WIDTH // 2, "gates.1": WIDTH // 2}
    assert result.model.gates[0].up.weight.equal(result.original.gates[0].up.weight[: WIDTH // 2])
    facts.save_compressed(result, tmp_path / "one")
    loaded = facts.load_compressed(tmp_path / "one", Network().double())
    x = torch.randn(3, 12).double()
    assert loaded.plan == result.plan and loaded.model(x).equal(result.model(x))
    fisher = facts.compress(prepared, ratio=0.5, budget=facts.Budget(rounds=()))
    facts.save_elastic(fisher, tmp_path / "any")
    cut = facts.load_compressed(tmp_path / "any", Network().double(), ratio=0.5)
    assert cut.plan == fisher.plan and cut.model(x).equal(fisher.model(x))


def test_its_time_is_measured(prepared):
    table = prepared.latency_table(2)
    assert table.shares == {"gates.0": 1, "gates.1": 1}
    assert 0 < table.seconds("gates.0", 6) < table.dense


def test_its_cost_may_depend_on_the_parts_before_it(prepared):
    problem = facts.search.AllocationProblem(prepared, facts.estimators.PELA(), {}, {"flops": 0.5})
    both, first_is_one = ({"gates.0": rank, "gates.1": 8} for rank in (8, 1))
    assert problem.spent(both) == (2 * 24 * (8 + 8),)
    assert problem.spent(first_is_one) == (2 * 24 * 1,)


def test_a_candidate_that_is_left_alone_has_a_reason(model):
    class Shifted(Gate):
        def forward(self, x):
            return super().forward(x) + self.up.weight[0].sum()

    shifted = Network().double().eval()
    shifted.gates[0] = Shifted().double()
    prepared = facts.prepare(shifted, image_batches([8, 8], shape=(12,)), parts="toy")
    assert set(prepared.parts) == {"gates.0.up", "gates.0.down", "gates.1"}
    assert prepared.skipped["gates.0.up"] == "the gate computes something else"
