"""Experiments that are chosen: draws, collections, and ablations of any field as the rows of a table."""

from io import StringIO

import pandas as pd
import pytest

from experiments.cell import by_data, cells_of
from experiments.reproduce import main as reproduce
from tests.docs.test_results import committed
from tests.experiments.conftest import SMALL
from tests.experiments.test_config import TABLES
from tests.refusals import refused, refuses

SHRINKAGE = ["axis=estimator.shrinkage_row", "values=[0,0.3]"]


@pytest.fixture
def ablation(chosen):
    """A function that makes the ablation of an axis, its values and other overrides."""
    return lambda *overrides: chosen("experiment=ablation", *overrides)[0]


def test_a_row_for_each_value_in_the_columns_of_all_ablations(ablation):
    experiment = ablation(*SHRINKAGE, "search=cors")
    assert experiment.name == "ablation_estimator_shrinkage_row_0_0-3_search-cors"
    assert experiment.axis_title == "estimator.shrinkage_row"
    assert experiment.title == "Ablation of estimator.shrinkage_row, at 50 % (small DeiT-B) and 60 % (small Swin-B)"
    assert experiment.rows == {"0": ["estimator.shrinkage_row=0"], "0.3": ["estimator.shrinkage_row=0.3"]}
    assert list(experiment.notes) == ["Made with search=cors."]
    grid = cells_of(experiment)
    settings = [(cell.column, cell.config.ratio, cell.config.estimator.shrinkage_row) for cell in grid]
    assert settings == [("DeiT-B", 0.5, 0), ("Swin-B", 0.6, 0), ("DeiT-B", 0.5, 0.3), ("Swin-B", 0.6, 0.3)]
    assert {cell.config.search._target_ for cell in grid} == {"facts.search.CoRS"}
    assert {cell.config.experiment.name for cell in grid} | {cell.experiment for cell in grid} == {experiment.name}
    assert ablation("axis=ratio", "values=[0.5]").title == "Ablation of ratio"


def test_draws_follow_the_seed_and_share_no_data_pass(ablation):
    grid = cells_of(ablation(*SHRINKAGE, "model=deit_s", "seeds=2", "seed=5"))
    seeds = [(cell.draw, cell.config.seed, cell.config.task.mini.seed) for cell in grid]
    assert seeds == [(0, 5, 5)] * 2 + [(1, 6, 6)] * 2
    assert [[cell.draw for cell in part] for part in by_data(grid)] == [[0, 0], [1, 1]]
    assert {(cell.column, cell.config.model.name) for cell in grid} == {("DeiT-S", "deit_s")}


def test_the_main_tables_have_three_draws_in_mini_and_one_at_full_scale(chosen):
    """A run of `make reproduce` would otherwise replace the README's means by one draw."""
    names = ["classification_40", "classification_50", "classification_60"]
    for given, draws in (("profile=mini", 3), ("profile=paper", 1), ("seeds=2", 2)):
        assert [each.seeds for each in chosen(f"experiment=[{','.join(names)}]", given)] == [draws] * 3
    tables = (pd.read_csv(StringIO(committed(f"results/mini/tables/{name}.csv"))) for name in names)
    assert all(table.deviation.notna().any() for table in tables)


def test_paper_is_an_earlier_name_of_the_main_job_and_imagenet_its_part_that_classifies(chosen, without_module):
    without_module("none")
    main, paper, part = (chosen(f"experiment={name}") for name in ("main", "paper", "imagenet"))
    assert [each.name for each in main] == [each.name for each in paper]
    expected = [each.name for each in main if each.task in ("classification", "digits")]
    assert [each.name for each in part] == expected and len(main) > len(expected) > 10


def test_any_tables_can_be_named_in_a_list(chosen):
    """Hydra merges their files, which fails for a mapping in one and a list in another."""
    assert [each.name for each in chosen(f"experiment=[{','.join(TABLES)}]")] == TABLES


def test_rows_of_choices_lists_and_several_fields(ablation):
    assert ablation("axis=finetuning", "values=[[]]").rows == {"none": ["finetuning=[]"]}
    several = "axis=[estimator.grad_clip,estimator.normalize]", "values={neither:[null,none],1:[median,batch]}"
    experiment, neither = ablation(*several), ["estimator.grad_clip=null", "estimator.normalize=none"]
    assert experiment.rows == {"neither": neither, "1": ["estimator.grad_clip=median", "estimator.normalize=batch"]}
    assert not experiment.notes


def test_no_two_ablations_have_the_same_name(ablation):
    several = ["axis=[estimator.grad_clip,estimator.normalize,estimator.num_iterations]", "values=[[null,none,1]]"]
    row, column = "axis=estimator.shrinkage_row", ["axis=estimator.shrinkage_col", "values=[0.3]"]
    lines = [[row, "values=[0.3]"], [row, "values=[0,3e-1]"], column, [*column, "~experiment.columns.DeiT-B"]]
    lines += [[*several, "search=cors"], [*several, "search=asvd"]]
    names = [ablation(*line, "model=deit_s").name for line in lines]
    assert len(set(names)) == len(lines)
    assert max(map(len, names)) < 120 and all(name.replace("-", "_").isidentifier() for name in names)
    of_the_run = ["results=/elsewhere", "workers=2", "tracking=off", "imagenet=/data"]
    assert ablation(*lines[0], "model=deit_s", *of_the_run).name == names[0]
    assert ablation(*lines[0], "model=deit_s", "experiment.name=mine").name == "mine"
    for name in ("units", "../mine"):
        refuses("give it a new name", ablation, *lines[0], f"experiment.name={name}")


test_an_axis_or_a_value_that_cannot_be_is_refused_in_one_line = refused(
    (["axis=[ratio,seed]", "values=[[0.5,1],[0.4]]"], r"a list of 2 settings \(ratio, seed\), got \[0\.4\]"),
    (["axis=[ratio,ratio]", "values=[[0.5,0.4]]"], "axis names a field twice: ratio, ratio"),
    (["axis=[ratio,profile.name]", "values=[[0.5,mini]]"], "a cell's field, such as ratio, but profile concerns"),
    (["axis=ratio", "values=[0.5,0.4,0.5]"], "values holds 0.5 twice"),
    (["axis=workers", "values=[1,2]"], "but workers concerns the whole run"),
    ([*SHRINKAGE, "seeds=0"], "seeds must be from 1 to 1,000, got 0"),
    ([*SHRINKAGE, "seeds=1001"], "seeds must be from 1 to 1,000, got 1001"),
    (["axis=ratio"], "the experiment ablation, which needs both"),
    by=lambda overrides, ablation: ablation(*overrides),
)


@pytest.mark.system
def test_a_table_and_a_plot_of_a_field(command, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.output.results.every_experiment", list)
    given = [*SHRINKAGE, *SMALL, "model=deit_s", "experiment.name=mine", "workers=1"]
    command(reproduce, "experiment=ablation", *given)
    table = pd.read_csv(tmp_path / "mini/tables/mine.csv", dtype={"row": str})
    cells = table[table.metric.eq("top1") & table.fingerprint.notna()]
    assert cells[["row", "column", "status"]].to_numpy().tolist() == [[row, "DeiT-S", "done"] for row in ("0", "0.3")]
    assert cells.fingerprint.nunique() == 2
    text = (tmp_path / "mini/tables/mine.md").read_text()
    assert text.startswith("# Ablation of estimator.shrinkage_row, at 50 % (small DeiT-S)\n")
    assert (tmp_path / "mini/figures/mine.png").exists()
    assert '<table id="table-mine">' in (tmp_path / "mini/report.html").read_text()
