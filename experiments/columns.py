"""Runs of the cells that share a network and its data, after one data pass for all their estimators."""

import logging
from collections.abc import Iterator

from experiments.cell import Cell
from experiments.grid import GridCell
from experiments.runner import collect_moments, earlier_record, open_cell, run_cell
from facts.utils.files import HeldElsewhere

log = logging.getLogger(__name__)


def share_data_pass(grid_cells: list[GridCell]) -> None:
    """Put into the cache what the estimators of the unfinished cells need. A failure leaves each cell its own pass."""
    try:
        collect_moments([cell for _, cell in _opened(grid_cells)])
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
            yield grid_cell, open_cell(grid_cell.known_config)
        except Exception as error:
            _fail(grid_cell, error)


def fill(grid_cell: GridCell, cell: Cell, wait: bool) -> bool:
    """Run a cell; False if another process runs it and this one is not to wait."""
    try:
        grid_cell.record, grid_cell.status = run_cell(cell, wait), "done"
    except HeldElsewhere:
        return False
    except Exception as error:
        grid_cell.record = earlier_record(cell)
        _fail(grid_cell, error)
    return True


def _fail(grid_cell: GridCell, error: Exception) -> None:
    grid_cell.status = "failed"
    log.error("%s, %s, %s: %s", grid_cell.experiment, grid_cell.row, grid_cell.column, error)
