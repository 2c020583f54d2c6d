"""Runs of the cells that share a network and its data, after one data pass for all their estimators."""

import logging
from collections.abc import Collection
from functools import partial

from experiments.cell import Cell
from experiments.grid import GridCell
from experiments.runner import open_cell, run_cell
from facts.moments import Moment
from facts.utils import distributed
from facts.utils.files import HeldElsewhere

log = logging.getLogger(__name__)


def run_column(grid_cells: list[GridCell]) -> None:
    """Run the cells and write their records.

    A cell that fails is recorded as failed and does not stop the others; one that another process runs comes last.
    """
    cells: list[tuple[GridCell, Cell]] = []
    for grid_cell in grid_cells:
        try:
            cells.append((grid_cell, distributed.on_all_ranks(partial(open_cell, grid_cell.known_config))))
        except Exception as error:
            _fail(grid_cell, error)
    try:
        distributed.on_all_ranks(lambda: share_data_pass([cell for _, cell in cells]))
    except Exception as error:
        log.error("the shared data pass failed (%s); each cell runs its own", error)
    held_elsewhere = [(grid_cell, cell) for grid_cell, cell in cells if not fill(grid_cell, cell, wait=False)]
    for grid_cell, cell in held_elsewhere:
        fill(grid_cell, cell, wait=True)


def fill(grid_cell: GridCell, cell: Cell, wait: bool) -> bool:
    """Run a cell; False if another process runs it and this one is not to wait."""
    try:
        grid_cell.record, grid_cell.status = distributed.on_all_ranks(lambda: run_cell(cell, wait)), "done"
    except HeldElsewhere:
        return False
    except Exception as error:
        grid_cell.record = distributed.on_main_rank(cell.earlier_record)
        _fail(grid_cell, error)
    return True


def share_data_pass(cells: list[Cell]) -> None:
    """Put the union of the moments that the unfinished cells need into the cache."""
    cached = [cell for cell in cells if cell.config.cache and cell.method.needed_estimator]
    records = distributed.on_main_rank(lambda: [cell.earlier_record() for cell in cached])
    unfinished = [cell for cell, record in zip(cached, records, strict=True) if not record or record.status != "done"]
    if moments := _moments(unfinished):
        unfinished[0].calibration.collect(moments)
    analysed = [cell for cell in unfinished if cell.analysis and cell.analysis.needs_factors]
    if moments := _moments(analysed):
        data, _ = analysed[0].task.analysis(analysed[0].model)
        analysed[0].calibration.on(data).moments(moments)  # in one pass for all layers, as analyses read them


def _moments(cells: list[Cell]) -> Collection[Moment]:
    """The moments that the cells' estimators need, each once."""
    estimators = [cell.method.needed_estimator for cell in cells if cell.method.needed_estimator]
    return list(dict.fromkeys(moment for estimator in estimators for moment in estimator.moments))


def _fail(grid_cell: GridCell, error: Exception) -> None:
    grid_cell.status = "failed"
    log.error("%s, %s, %s: %s", grid_cell.experiment, grid_cell.row, grid_cell.column, error)
