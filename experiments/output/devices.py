"""Rows of other devices for a table of timings: from records of other machines, and from the paper."""

import json
from pathlib import Path
from typing import Any

from experiments.config import Experiment
from experiments.grid import GridCell
from experiments.paper import paper_values
from experiments.record import Record, published_records, read_records

# The number of the results is one of them, since not every machine is available when it is raised.
OWN_TO_A_DEVICE = ("machine", "num_threads", "results")


def rows_of_other_devices(experiment: Experiment, grid: list[GridCell], folder: Path) -> list[GridCell]:
    """Add a row for each other device: the latest record of a cell there, or the paper's values."""
    own = [cell for cell in grid if cell.record]
    found: dict[tuple[str, str], GridCell] = {}
    known = [*published_records(experiment.name, folder), *read_records(folder / "records")]  # the latter are complete
    for record in sorted((each for each in known if each.status == "done"), key=lambda record: record.time):
        for cell in own:
            assert cell.record
            device = device_of(record)
            if work_of(record) == work_of(cell.record) and device != device_of(cell.record):
                found[device, cell.column] = GridCell(experiment.name, device, cell.column, None, "done", record)
    published = dict.fromkeys((row, column) for row, column, _ in paper_values(experiment.name))
    return [*found.values(), *(GridCell(experiment.name, row, column, None, "done") for row, column in published)]


def kept_records(experiment: Experiment, grid: list[GridCell], folder: Path) -> list[Record]:
    """Collect records for the table's file: those of its cells, and earlier ones of other work or devices."""
    records = [cell.record for cell in grid if cell.record]
    here = {(work_of(record), device_of(record)) for record in records}
    earlier = published_records(experiment.name, folder)
    return [*(each for each in earlier if (work_of(each), device_of(each)) not in here), *records]


def work_of(record: Record) -> str:
    """Make a key for a record's work, the same on every device."""
    identity: dict[str, Any] = {name: record.identity[name] for name in record.identity if name not in OWN_TO_A_DEVICE}
    return json.dumps([identity, record.model_hash, record.data_hash], sort_keys=True)


def device_of(record: Record) -> str:
    """Name the device that did the work: the GPU, or the processor with its threads."""
    on_gpu = record.config["hardware"]["device"].startswith("cuda")
    machine = record.machine
    return machine["gpu"] if on_gpu else f"{machine['processor']}, {machine['threads']} threads"
