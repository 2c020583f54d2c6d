"""The kind of part of docs/extending.md, through the whole library; and one whose costs depend on the parts before."""

import runpy
from copy import deepcopy
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from torch import nn

import facts
from experiments.cell import Cell
from experiments.output.entries import entries_of
from experiments.output.tables import write_tables
from experiments.runner import run_cell
from facts.models import Recipe
from facts.parts import KINDS
from facts.parts.base import Found, computes_the_same
from facts.utils.options import options
from tests.docs.pages import section_of, write_files
from tests.records import demo


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the page's file defines: its kind, a network of two adapters, data, and a result."""
    write_files(section_of("docs/extending.md", "A kind of part"), folder := tmp_path_factory.mktemp("parts"))
    with patch.dict(KINDS):
        yield runpy.run_path(str(folder / "my_parts.py"))


@pytest.fixture
def prepared(page):
    return facts.prepare(page["model"], page["calibration"], parts="adapters")


def test_it_is_compressed_printed_saved_loaded_and_cut(page, prepared, tmp_path):
    assert [*prepared.parts] == ["0", "1"]
    assert "2 of 2 units narrower (widths 16 to 16)" in str(page["result"])
    for name, result in (("page", page["result"]), ("uniform", facts.compress(prepared, search="uniform", ratio=0.5))):
        assert 0 < sum(result.plan.values()) <= 32 and result.summary.after.params < prepared.cost.params
        assert [adapter.up.in_features for adapter in result.model[:2]] == [*result.plan.values()]
        facts.save_compressed(result, tmp_path / name)
        loaded, x = facts.load_compressed(tmp_path / name, deepcopy(page["model"])), torch.randn(3, 16)
        assert loaded.plan == result.plan and loaded.model(x).equal(result.model(x))
    assert result.plan == {"0": 16, "1": 16}
    fisher = facts.compress(prepared, ratio=0.5)
    facts.save_elastic(fisher, tmp_path / "any")
    cut = facts.load_compressed(tmp_path / "any", deepcopy(page["model"]), ratio=0.5)
    assert cut.plan == fisher.plan and cut.model(x).equal(fisher.model(x))


@options
class Adapted(Recipe):
    """Two adapters between a layer that reads images of digits and a classifier."""

    kind = name = "adapted"

    def architecture(self):
        layers = [nn.Flatten(), nn.Linear(256, 16), self.adapter(16, 32), self.adapter(16, 32), nn.Linear(16, 100)]
        model = nn.Sequential(*layers)
        model.pretrained_cfg = {"input_size": (1, 16, 16)}
        return model


def test_it_has_a_row_in_a_table(page, cell_config, tmp_path, monkeypatch):
    monkeypatch.setattr(Adapted, "adapter", page["Adapter"], raising=False)
    network = [f"model.mini._target_={__name__}.Adapted", "model.mini.weights=random", "~model.mini.tag"]
    network += ["~model.mini.arguments", "parts=adapters", "estimator=facts", "search=uniform"]
    rows = {"all": ["estimator=none"], "half": ["ratio=0.5"]}
    experiment = demo(rows=rows, metrics={"gflops": "GFLOPs", "top1": "Top-1"})
    cells = [Cell(cell_config(*network, *own), "demo", row, "Net") for row, own in rows.items()]
    records = list(map(run_cell, cells))
    assert {*records[1].plan} == {"1", "2", "3"}
    write_tables(experiment, entries_of(experiment, cells, comparable=False), tmp_path)
    table = pd.read_csv(tmp_path / "demo.csv").set_index(["row", "metric"])
    assert table.ours["half", "gflops"] < 0.7 * table.ours["all", "gflops"] and (table.status == "done").all()


def test_its_time_is_measured(prepared):
    table = prepared.latency_table(2)
    assert table.shares == {"0": 1, "1": 1} and 0 < table.seconds("0", 6) < table.dense


def test_costs_may_depend_on_the_parts_before_and_a_candidate_that_is_left_alone_has_a_reason(page):
    """The second adapter is free if the first is as narrow as can be; one that reads its own weights is no part."""

    class Dependent(page["AdapterUnit"]):
        def flops(self, rank, plan):
            return 0 if self.name == "1" and plan.get("0") == 1 else super().flops(rank, plan)

    def in_another_order(adapter):
        for parameter, axis in ((adapter.down.weight, 0), (adapter.down.bias, 0), (adapter.up.weight, 1)):
            parameter.copy_(parameter.flip(axis))

    class Verified(page["Adapters"]):
        def find(self, model, owner, call):
            part = self.at(model, owner)
            if computes_the_same(model.get_submodule(owner), call, lambda adapter: None, in_another_order):
                return Found((Dependent(**vars(part)),))
            return Found(reasons=dict.fromkeys(part.layers, "the adapter computes something else"))

    class Shifted(page["Adapter"]):
        def forward(self, x):
            return super().forward(x) + self.down.weight[0].sum()

    model, data = deepcopy(page["model"]).double(), [(x.double(), y) for x, y in page["calibration"]]
    with patch.dict(KINDS, adapters=(Verified(),)):
        prepared = facts.prepare(model, data, parts="adapters")
        problem = facts.search.AllocationProblem(prepared, facts.estimators.PELA(), {}, {"flops": 0.5})
        assert [problem.spent({"0": rank, "1": 8}) for rank in (8, 1)] == [(2 * 32 * (8 + 8),), (2 * 32 * 1,)]
        model[0] = Shifted(16, 32).double()
        prepared = facts.prepare(model, data, parts="adapters")
        assert set(prepared.parts) == {"0.down", "0.up", "1"}
        assert prepared.skipped["0.up"] == "the adapter computes something else"
