"""The order in which cells run, and that it makes no difference who runs them."""

import copy
import pickle
from concurrent.futures import Executor, Future
from functools import partial

import pytest
from omegaconf import OmegaConf

import experiments.workers
from experiments.grid import GridCell
from experiments.launchers.processes import AtOnce, Processes
from experiments.workers import is_timed, launcher_of, run_grid
from facts.utils import distributed
from tests.records import make_record

TIMED = "timed"


def cell(experiment: str, network: str, row: str) -> GridCell:
    parts = {"model": {"mini": {"name": network}}, "task": {"mini": {}}}
    config = OmegaConf.create({"profile": {"name": "mini"}, "labels": "given", "excluded_names": [], **parts})
    return GridCell(experiment, row, network, config)


def table(experiment: str, *rows: str) -> list[GridCell]:
    """Rows of two networks, as `grid_of` makes them: row by row."""
    return [cell(experiment, network, row) for row in rows for network in ("DeiT", "Swin")]


@pytest.fixture
def grid() -> list[GridCell]:
    """Two tables, of which the first measures time in one row; one cell of it has no configuration."""
    left_out = GridCell("first", "none", "DeiT", None, "n.a.")
    return [*table("first", "A", TIMED), left_out, *table("second", "A", "B")]


@pytest.fixture
def steps(monkeypatch) -> list[tuple]:
    """What was run, in order; the runs are made up."""
    steps = []

    def share_data_pass(cells: list[GridCell]) -> None:
        steps.append(("pass", cells[0].column, len(cells)))

    def run_cells(cells: list[GridCell]) -> None:
        steps.append((cells[0].experiment, cells[0].column, "".join(cell.row for cell in cells)))
        for each in cells:
            each.record, each.status = make_record("/".join(name_of(each))), "done"

    monkeypatch.setattr(experiments.workers, "share_data_pass", share_data_pass)
    monkeypatch.setattr(experiments.workers, "run_cells", run_cells)
    monkeypatch.setattr(experiments.workers, "is_timed", lambda cell: cell.row == TIMED)
    return steps


def name_of(cell: GridCell) -> tuple[str, str, str]:
    return cell.experiment, cell.row, cell.column


def sent(values):
    """As they arrive in another process."""
    return pickle.loads(pickle.dumps(values))


class Elsewhere(AtOnce):
    """Works on copies, as another process does."""

    def submit(self, task, /, *args, **kwargs) -> Future:
        return super().submit(task, *sent(args), **kwargs)


class Later(Future):
    """Its work is done when somebody asks for the result."""

    def __init__(self, task, args):
        super().__init__()
        self.work = partial(task, *sent(args))

    def result(self, timeout=None):
        if not self.done():
            self.set_result(self.work())
        return super().result()


class Backwards(Executor):
    """Several workers, of which the one that began last is always the first to finish."""

    def __init__(self, monkeypatch):
        self.most = 0
        monkeypatch.setattr(experiments.workers, "wait", self.wait)

    def submit(self, task, /, *args) -> Future:
        return Later(task, args)

    def wait(self, running, return_when):
        self.most = max(self.most, len(running))
        *others, last = running
        return {last}, set(others)


def test_one_worker_keeps_the_order_and_a_network_begins_with_its_data_pass(grid, steps):
    """What measures time comes last, but the pass is for its cells too."""
    parts = list(run_grid(grid, AtOnce(), 1))
    assert steps == [
        ("pass", "DeiT", 4),
        ("first", "DeiT", "A"),
        ("pass", "Swin", 4),
        ("first", "Swin", "A"),
        ("second", "DeiT", "AB"),
        ("second", "Swin", "AB"),
        ("first", "DeiT", TIMED),
        ("first", "Swin", TIMED),
    ]
    given = [(experiment, column, rows) for experiment, column, rows in steps if experiment != "pass"]
    assert [(part[0].experiment, part[0].column, "".join(cell.row for cell in part)) for part in parts] == given


@pytest.mark.parametrize("make", [Elsewhere, AtOnce])
def test_results_come_back_into_the_cells_of_the_grid(grid, steps, make):
    parts = list(run_grid(grid, make(), 1))
    own = {id(cell) for cell in grid}
    assert all(id(cell) in own for part in parts for cell in part)
    for each in grid:
        if each.config is None:
            assert (each.status, each.record) == ("n.a.", None)
        else:
            assert (each.status, each.record.fingerprint) == ("done", "/".join(name_of(each)))


def test_a_failure_comes_back_too(grid, steps, monkeypatch):
    def failing(cells: list[GridCell]) -> None:
        for each in cells:
            each.status, each.record = "failed", make_record("f", "failed", error="no luck")

    monkeypatch.setattr(experiments.workers, "run_cells", failing)
    list(run_grid(grid, Elsewhere(), 1))
    cells = [each for each in grid if each.config is not None]
    assert all(each.status == "failed" and each.record.error == "no luck" for each in cells)


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_several_workers_find_what_one_finds_in_whatever_order_they_finish(grid, steps, monkeypatch, num_workers):
    alone = copy.deepcopy(grid)
    list(run_grid(alone, Elsewhere(), 1))
    expected = list(steps)
    steps.clear()
    workers = Backwards(monkeypatch)
    list(run_grid(grid, workers, num_workers))
    assert [(each.status, each.record and each.record.fingerprint) for each in grid] == [
        (each.status, each.record and each.record.fingerprint) for each in alone
    ]
    assert sorted(steps) == sorted(expected) and steps != expected
    assert steps[-2:] == expected[-2:]  # what measures time
    for network in ("DeiT", "Swin"):
        assert next(step for step in steps if step[1] == network)[0] == "pass"
    assert 2 <= workers.most <= num_workers


def test_no_more_parts_are_under_way_than_there_are_workers(steps, monkeypatch):
    grid = [each for name in ("first", "second", "third") for each in table(name, "A")]
    workers = Backwards(monkeypatch)
    list(run_grid(grid, workers, 3))
    assert workers.most == 3
    assert len(steps) == 2 + 6


def test_a_grid_without_a_cell_to_run_is_done_at_once(steps):
    assert list(run_grid([GridCell("first", "A", "DeiT", None, "n.a.")], AtOnce(), 4)) == []
    assert steps == []


class Fragile(AtOnce):
    """Its process dies in the first table's part of a network."""

    def submit(self, task, /, *args, **kwargs) -> Future:
        (cells,) = args
        if task is not experiments.workers.run_part or (cells[0].experiment, cells[0].column) != ("first", "DeiT"):
            return super().submit(task, *args, **kwargs)
        future: Future = Future()
        future.set_exception(RuntimeError("killed"))
        return future


def test_the_cells_of_a_process_that_died_have_failed_and_the_others_go_on(steps, caplog):
    grid = [*table("first", "A"), *table("second", "A")]
    list(run_grid(grid, Fragile(), 1))
    assert [each.status for each in grid] == ["failed", "done", "done", "done"]
    assert "first, DeiT: the process died (killed)" in caplog.text


def test_torchrun_divides_cells_and_no_launcher_does(cell_config, monkeypatch):
    monkeypatch.setattr(distributed, "size", lambda: 2)
    assert isinstance(launcher_of(cell_config()), Processes)
    with pytest.raises(ValueError, match="start it without launcher="):
        launcher_of(cell_config("launcher=submitit_local"))


def test_cells_that_measure_time_are_told_from_the_others(cell_config):
    for overrides, expected in ((["analysis=throughput"], True), ([], False), (["estimator.shrinkage_row=3"], False)):
        assert is_timed(GridCell("demo", "row", "column", cell_config(*overrides))) == expected
