"""Runs of the cells that share a network and its data, after one data pass for all their estimators."""

import logging
from collections.abc import Iterable, Iterator
from functools import partial

from experiments.cell import Cell
from experiments.grid import GridCell
from experiments.runner import open_cell, run_cell
from facts.utils import distributed
from facts.utils.files import HeldElsewhere

log = logging.getLogger(__name__)


def share_data_pass(grid_cells: list[GridCell]) -> None:
    """Put into the cache what the estimators of the unfinished cells need. A failure leaves each cell its own pass."""
    try:
        distributed.on_all_ranks(lambda: _collect(cell for _, cell in _opened(grid_cells)))
    except Exception as error:
        log.error("the shared data pass failed (%s); each cell runs its own", error)


def run_cells(grid_cells: list[GridCell]) -> None:
    """Run the cells and write their records.

    A cell that fails is recorded as failed and does not stop the others; one that another process runs comes last.
    """
    held_elsewhere = [place for place in _opened(grid_cells) if not fill(*place, wait=False)]
    for grid_cell, cell in held_elsewhere:
        fill(grid_cell, cell, wait=True)


def _opened(grid_cells: list[GridCell]) -> Iterator[tuple[GridCell, Cell]]:
    """Open each cell when its turn comes; those that cannot be opened have failed."""
    for grid_cell in grid_cells:
        try:
            yield grid_cell, distributed.on_all_ranks(partial(open_cell, grid_cell.known_config))
        except Exception as error:
            _fail(grid_cell, error)


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


def _collect(cells: Iterable[Cell]) -> None:
    """Collect the moments of all the cells' data at once, then those of the data that analyses read."""
    cached = [cell for cell in cells if cell.config.cache and cell.method.needed_estimator]
    records = distributed.on_main_rank(lambda: [cell.earlier_record() for cell in cached])
    unfinished = [cell for cell, record in zip(cached, records, strict=True) if not record or record.status != "done"]
    for fit_bias in (False, True):  # moments of other inputs
        alike = [cell for cell in unfinished if cell.config.fit_bias == fit_bias]
        if estimators := [cell.method.needed_estimator for cell in alike if cell.method.needed_estimator]:
            alike[0].calibration.collect(estimators)
    analysed = [cell for cell in unfinished if cell.analysis and cell.analysis.needs_factors]
    wanted = [cell.method.needed_estimator for cell in analysed if cell.method.needed_estimator]
    if moments := list(dict.fromkeys(moment for estimator in wanted for moment in estimator.moments)):
        data, _ = analysed[0].task.analysis(analysed[0].model)
        analysed[0].calibration.on(data).moments(moments)  # in one pass for all layers, as analyses read them


def _fail(grid_cell: GridCell, error: Exception) -> None:
    grid_cell.status = "failed"
    log.error("%s, %s, %s: %s", grid_cell.experiment, grid_cell.row, grid_cell.column, error)
