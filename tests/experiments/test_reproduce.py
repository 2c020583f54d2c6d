"""Whole tables: what is refused, failing cells, and one data pass for a column."""

from concurrent.futures import BrokenExecutor
from unittest.mock import Mock

import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

import experiments.reproduce
from experiments.config import Experiment
from experiments.grid import every_experiment, verified
from experiments.record import unpacked
from experiments.reproduction import drawings_of
from experiments.runner import open_cell, run_cell, run_part, share_data_pass
from facts.moments.collect import MomentPass
from tests.experiments.conftest import SMALL
from tests.records import demo, make_record, place
from tests.refusals import refused, refuses

FIGURE = "experiment=sensitivity_interpolation"  # of one cell
MINE = "+experiment.rows.Mine="
GOOD = "name: mine\ntask: classification\nmetrics: {top1: Top-1}\nranked_by: top1\ncolumns: {Net: []}\nrows: {A: []}\n"


@pytest.fixture
def reproduce(command, monkeypatch):
    """A function from overrides to a run of `reproduce` in this process, of one figure's only cell."""
    return lambda *overrides: command(experiments.reproduce.main, *overrides, FIGURE, "workers=1")


test_what_cannot_be_is_refused_in_a_line_that_names_it = pytest.mark.attack(
    refused(
        (MINE + '["estimator=fact"]', r"sens.+, Mine, .+: estimator/fact is not one of asvd, .*facts"),
        (MINE + '["ratios=1"]', r"sens.+, Mine, .+: there is no field ratios; .* \(did you mean ratio\?"),
        ("experiment.figure=stairs", "no figure is called stairs; there are ablation, .*steps"),
        ("experiment=[]", "experiment= names nothing: name a table"),
        ("experiment=[units,main]", "main is a collection, but a list or a collection may name only tables"),
        ("+experiment.experiments=[imagenet]", "imagenet is a collection, but a list"),
        ("workers=0", "workers must be at least 1, or null for one per processor, got 0"),
        by=lambda override, command: command(experiments.reproduce.main, FIGURE, override, "plan=true"),
        error=SystemExit,
        start="^error: ",
    )
)


def test_the_plan_shows_brackets_in_a_title(reproduce):
    assert "A [/b] B" in reproduce("experiment.title='A [/b] B'", "plan=true")


def test_ctrl_c_says_what_is_kept(reproduce, monkeypatch, capsys):
    monkeypatch.setattr("experiments.reproduction.reproduce", Mock(side_effect=KeyboardInterrupt))
    refuses("130", reproduce, raised=SystemExit)
    assert capsys.readouterr().err == "interrupted: what is finished is kept, and the same command continues\n"


def checked_with(right, wrong):
    content = OmegaConf.create(GOOD.replace(right, wrong))
    return verified(OmegaConf.merge(OmegaConf.structured(Experiment), content), "mine")


test_a_table_of_nothing_is_refused_before_any_work = pytest.mark.attack(
    refused(
        ("columns: {Net: []}", "", r" has no columns, and would produce nothing"),
        ("metrics: {top1: Top-1}", "", r" has no metrics, and would produce nothing"),
        ("task:", "notes: [in mini: few]\ntask:", r"notes\.0=\{'in mini': 'few'\}: input should be a valid string"),
        by=checked_with,
        start=r"^experiment/mine\.yaml.*",
    )
)


@pytest.mark.attack
def test_a_table_over_another_does_not_cost_the_others_their_report(tmp_path, caplog):
    files = {"good": GOOD.replace("mine", "good"), "bad": GOOD, "main": "name: main\nexperiments: [good]"}
    (tmp_path / "experiment").mkdir()
    (tmp_path / "run.yaml").write_text("defaults: [schema, _self_, experiment: null]")
    for name, text in files.items():
        (tmp_path / f"experiment/{name}.yaml").write_text(text)
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert [experiment.name for experiment in every_experiment()] == ["good"]
    reason = "results go under the name, which must be the file's: bad, not mine"
    assert caplog.messages == [f"bad is left out: experiment/bad.yaml: {reason}"]


@pytest.mark.system
def test_cells_that_failed_are_counted_at_the_end(reproduce, monkeypatch):
    monkeypatch.setattr("experiments.reproduction.report_on_all", lambda folder: None)
    with pytest.raises(SystemExit, match=r"1 of 1 cells failed: the log says why. Run again to retry them."):
        reproduce("model.mini.weights=nowhere.safetensors", "force=true")
    monkeypatch.setattr("experiments.runner.measure", lambda cell: 1 / 0)
    refuses(r"1 of 1 cells failed: see .*/records/\w{16}.json. Run again", reproduce, *SMALL, raised=SystemExit)


def test_a_second_worker_that_dies_ends_the_run_with_advice(reproduce, monkeypatch):
    monkeypatch.setattr("experiments.workers.run_tables", Mock(side_effect=BrokenExecutor("killed")))
    refuses(r"a worker died again, .* \(killed\): start again with fewer workers=", reproduce, raised=SystemExit)


def test_a_table_of_several_draws_appears_after_the_first_too():
    cells = [place(row, draw=draw) for draw in range(3) for row in "AB"]
    experiment = demo(seeds=3)
    assert drawings_of(experiment, cells) == [(experiment, cells[:2], cells[:2]), (experiment, cells, cells[2:])]
    for cell in cells[2:]:
        cell.record = make_record()
    assert drawings_of(experiment, cells) == [(experiment, cells, cells)]


@pytest.fixture
def small(make_cell):
    """A function that makes a cell of a network with random weights from an estimator and other overrides."""
    return lambda estimator, *overrides: make_cell(f"estimator={estimator}", *SMALL, *overrides)


@pytest.mark.system
def test_a_column_needs_one_data_pass_and_a_failing_cell_does_not_lose_the_others(small, monkeypatch):
    passes, real, real_pass = [], run_cell, MomentPass.run

    def failing(cell, *rest):
        if type(cell.method.needed_estimator).__name__ == "ASVD":
            raise RuntimeError("no luck")
        return real(cell, *rest)

    cells = [*map(small, ("svd_llm", "kfac_expand", "gfwsvd", "asvd")), small("facts", "estimator.shrinkage_row=3")]
    monkeypatch.setattr(MomentPass, "run", lambda *given: passes.append(given) or real_pass(*given))
    monkeypatch.setattr("experiments.runner.run_cell", failing)
    run_part(cells)
    assert [cell.status for cell in cells] == ["done", "done", "done", "failed", "failed"]
    record = cells[0].record
    assert unpacked(record.outcomes["top1"]).mean() * 100 == pytest.approx(record.metrics["top1"])
    assert len(passes) == 1  # GFWSVD, whose gradients are too large to keep, was decomposed in the shared pass
    share_data_pass([small("svd_llm")])
    assert len(passes) == 1
    share_data_pass([small("svd_llm"), small("facts")])
    assert len(passes) == 2


@pytest.mark.system
def test_cells_that_keep_no_cache_share_no_pass_and_are_cells_of_their_own(small):
    shared, alone = (small("facts", f"cache={cache}") for cache in ("true", "false"))
    assert open_cell(shared).fingerprint != open_cell(alone).fingerprint
    run_part([alone])
    assert not (alone.folder / "cache").exists()
    assert alone.record.values["total_minutes"] > 0
