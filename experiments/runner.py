"""Runs of cells: each runs once, under a lock, and leaves a record of its results.

Cells run side by side on a machine, but one that measures time runs on its own.
"""

import copy
import json
import logging
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import ReadWriteLock
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from experiments.cell import Cell
from experiments.compose import format_error
from experiments.config import USER_ERRORS
from experiments.methods import CompressedModel
from experiments.output.tracking import log_record, log_stage, tracked
from experiments.record import Record, packed, write_record
from facts.analysis.base import AnalysisInputs
from facts.calibration.data import Data
from facts.finetuning import Recovery, finetune
from facts.utils.files import HeldElsewhere, locked, replacing, writable_folder
from facts.utils.progress import report, reporting_to, timed

log = logging.getLogger(__name__)

LISTENER: ContextVar[Callable[[Cell], None] | None] = ContextVar("LISTENER", default=None)
"""Is told of each cell of a part that has run."""

_shared: ReadWriteLock | None = None


@contextmanager
def started(under_torchrun: bool = False) -> Iterator[None]:
    """Run a command. A user error or Ctrl-C ends it with one line; in a sweep, Hydra needs the error itself."""
    os.chdir(HydraConfig.get().runtime.cwd)  # a job may have been started elsewhere, by Ray or hydra.job.chdir
    try:
        if torch.distributed.is_torchelastic_launched() and not under_torchrun:
            raise ValueError("cells share out this machine's GPUs by workers=N: start it without torchrun")
        yield
    except KeyboardInterrupt:
        print("interrupted: what is finished is kept, and the same command continues", file=sys.stderr)
        raise SystemExit(130) from None
    except USER_ERRORS as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        raise SystemExit(format_error(error)) from error


def run_part(part: list[Cell]) -> list[Cell]:
    """Run cells that share a network and its data, after one data pass for all; return them with their records.

    A failure does not stop the others; cells that run elsewhere come last. A waiting process takes no turn: the other
    process may be waiting for its turn to measure.
    """
    folder, elsewhere = part[0].folder, []
    with shared_lock(folder):
        share_data_pass(part)
    for cell in part:
        with shared_lock(folder):
            if not run_or_defer(cell, wait=False):
                elsewhere.append(cell)
    for cell in elsewhere:
        run_or_defer(cell, wait=True)
    return part


def share_data_pass(part: list[Cell]) -> None:
    """Cache what the estimators of the unfinished cells need. After a failure, each cell runs its own pass."""
    cells = []
    for cell in part:
        with suppress(Exception):  # it fails again when it runs
            cells.append(open_cell(cell))
    try:
        collect_moments(cells)
    except Exception as error:
        log.error("the shared data pass failed (%s); each cell runs its own", error)


def collect_moments(cells: list[Cell]) -> None:
    """Cache what unfinished cells with the same network and data need: a pass for them all, and one for analyses."""
    cached = [cell for cell in cells if cell.config.cache and cell.method.needed_estimator]
    unfinished = [cell for cell in cached if not (record := cell.earlier_record()) or record.status != "done"]
    if estimators := [cell.method.needed_estimator for cell in unfinished if cell.method.needed_estimator]:
        unfinished[0].prepared.collect(estimators)
    analysed = [cell for cell in unfinished if cell.analysis and cell.analysis.needs_factors]
    wanted = [cell.method.needed_estimator for cell in analysed if cell.method.needed_estimator]
    if moments := list(dict.fromkeys(moment for estimator in wanted for moment in estimator.moments)):
        data, _ = analysed[0].task.analysis(analysed[0].model)
        analysed[0].prepared.on(data).moments(moments)  # in one pass for all layers, as analyses read them


def run_or_defer(cell: Cell, wait: bool) -> bool:
    """Run a cell; return False if another process runs it and `wait` is False."""
    cell.record, cell.error = None, ""
    try:
        with exclusive_lock() if cell.runs_alone else nullcontext():
            run_cell(cell, wait)
    except HeldElsewhere:
        return False
    except Exception as error:
        cell.error = reason_of(error)
        log.error("%s: %s", cell.place, cell.error)
    if listener := LISTENER.get():
        listener(cell)
    return True


def reason_of(error: Exception) -> str:
    """Say in a line why a cell failed; for an error in code, also its type and its last line outside libraries."""
    text = str(error)
    if not isinstance(error, USER_ERRORS):
        places = traceback.extract_tb(error.__traceback__)
        last = next((each for each in reversed(places) if "site-packages" not in each.filename), places[-1])
        text = f"{type(error).__name__}: {text} ({last.filename}, line {last.lineno})"
    return "; ".join([text, *getattr(error, "__notes__", ())])


def open_cell(cell: Cell) -> Cell:
    """Copy a cell, check it and load its network, which go with the copy. Raises an error that says what to change."""
    cell = copy.copy(cell)
    cell.check()
    hardware = cell.config.hardware
    torch.manual_seed(cell.config.seed)
    torch.set_float32_matmul_precision(hardware.matmul_precision)
    torch.backends.cudnn.allow_tf32 = hardware.matmul_precision != "highest"  # the same for convolutions
    if hardware.num_threads:
        torch.set_num_threads(hardware.num_threads)
    model = cell.model  # loaded now, with the seed set
    if cell.analysis:
        cell.analysis.check(model, cell.method.needed_estimator)
    return cell


def run_cell(cell: Cell, wait: bool = True) -> Record:
    """Run a cell unless it is done; it gets its record, also of a failure, which is raised again.

    If another process runs it, wait, or raise `HeldElsewhere` without `wait`.
    """
    label, opened = cell.place or cell.label, open_cell(cell)
    with locked(opened.folder / "locks" / f"{opened.fingerprint}.lock", wait):
        cell.record = opened.earlier_record()
        if cell.record and cell.record.status == "done":
            log.info("%s (%s) was done on %s", label, opened.fingerprint, cell.record.time)
            return cell.record
        number = cell.record.attempt + 1 if cell.record else 1
        log.info("%s (%s) runs, attempt %d", label, opened.fingerprint, number)
        try:
            cell.record = attempt(opened, number)
        except Exception:
            cell.record = opened.earlier_record()
            raise
    return cell.record


def attempt(cell: Cell, number: int) -> Record:
    """Run an open cell and write its record. A failure is recorded and raised again."""
    config = cell.config
    base = Record(
        fingerprint=cell.fingerprint,
        status="failed",
        config=cell.settings,
        identity=cell.identity,
        model_hash=cell.model_hash,
        data_hash=cell.data_hash,
        weights=cell.recipe.provenance(),
        attempt=number,
    )
    group = config.tracking.group or (config.experiment.name if config.experiment else None)
    shown: dict[str, Any] = {"name": cell.label, "tags": cell.label.split(" · "), "group": group, "config": base.config}
    with tracked(config.tracking, cell.folder, f"{cell.fingerprint}-{number}", **shown) as track:
        try:
            with reporting_to(lambda stage, values: track(lambda run: log_stage(run, stage, values))):
                record = replace(base, status="done", **measure(cell))
        except Exception as error:
            write_record(replace(base, error=traceback.format_exc()), cell.records)
            error.add_note(f"see {cell.records / cell.fingerprint}.json")
            raise
        write_record(record, cell.records)
        images = cell.folder / "images" / f"{cell.data_hash}.json"  # behind factors and sensitivities
        if (chosen := cell.task.chosen_images()) and not images.exists():
            with replacing(images) as path:
                path.write_text(json.dumps(chosen))
        track(lambda run: log_record(run, record))
    return record


@contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """Run the block alongside this machine's other processes, but not during their measurements."""
    global _shared
    _shared = ReadWriteLock(writable_folder(folder / "locks") / f"{platform.node()}.db")
    try:
        with _shared.read_lock():
            yield
    finally:
        _shared = None


@contextmanager
def exclusive_lock() -> Iterator[None]:
    """Run part of a `shared_lock` block while no other process is in its own; outside one or nested, do not wait."""
    global _shared
    if _shared is None:
        yield
        return
    lock, _shared = _shared, None
    lock.release()
    try:
        with lock.write_lock():
            yield
    finally:
        lock.acquire_read()
        _shared = lock


def measure(cell: Cell) -> dict[str, Any]:
    """Make the network and evaluate it; return the fields of its record."""
    compressed = cell.method.produce(cell)
    if cell.finetuning:
        compressed = trained(compressed, cell)
    model, seconds = compressed.model, dict(compressed.seconds)
    with timed(seconds, "evaluation"):
        evaluation = cell.task.evaluate(model, cell.execution.precision, cell.model)
    assert compressed.cost.flops is not None  # the shape is known
    cost = {"gflops": compressed.cost.flops / 1e9, "mparams": compressed.cost.params / 1e6}
    metrics, outcomes = {**evaluation, **cost, **compressed.metrics}, dict(evaluation.outcomes)
    fields: dict[str, Any] = {"plan": compressed.plan, "summary": compressed.summary}
    if analysis := cell.analysis:
        prepared, held_out = map(cell.prepared.on, cell.task.analysis(cell.model))
        inputs = AnalysisInputs(
            prepared=prepared,
            held_out=held_out,
            estimator=cell.method.needed_estimator,
            compressed=None if model is cell.model else model,
        )
        with exclusive_lock() if analysis.depends_on_device else nullcontext(), timed(seconds, "analysis"):
            findings = analysis.run(inputs)
        metrics |= findings.metrics
        outcomes |= findings.outcomes
        fields["analysis"] = findings.values
    shares = {metric: packed(values) for metric, values in outcomes.items()}
    return {**fields, "metrics": metrics, "outcomes": shares, "seconds": seconds}


def trained(compressed: CompressedModel, cell: Cell) -> CompressedModel:
    """Train a network by the cell's recipe: on the task's training data, or on calibration inputs without labels."""
    model, summary, original, folder = compressed.model, compressed.summary, cell.model, cell.folder / "finetuning"
    if isinstance(cell.finetuning, Recovery):
        data, error = Data.of(cell.task.calibration(original), original).divided(), cell.task.output_error
        model, recovery, distance = cell.finetuning.distill(model, original, data, error, folder)
        if summary:
            summary = replace(summary, recovery=recovery, distance=distance)
        seconds = recovery.seconds
    else:
        assert cell.finetuning
        model = copy.deepcopy(model) if model is original else model
        seconds = finetune(model, original, cell.task, cell.finetuning, folder).seconds
    report("finetuning", seconds=seconds)
    seconds += compressed.seconds.get("finetuning", 0.0)
    return replace(compressed, model=model, summary=summary, seconds={**compressed.seconds, "finetuning": seconds})
