"""Runs of cells: each runs once, under a lock, and leaves a record of its results."""

import copy
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from experiments.cell import Cell
from experiments.composition import refuse_hidden_files
from experiments.config import Tracking
from experiments.methods import Product
from experiments.outcomes import packed
from experiments.output.tracking import tracked
from experiments.record import Record, write_record
from experiments.turns import alone
from facts.analysis import Subject
from facts.calibration.data import division
from facts.finetuning import Recovery, finetune
from facts.utils import distributed
from facts.utils.files import locked, replacing
from facts.utils.reports import report, reporting_to
from facts.utils.stopwatch import timed

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def started() -> Iterator[None]:
    """Run a command in torchrun's processes. A user error ends it with one line, or in full on request or in sweeps."""
    distributed.join()
    try:
        refuse_hidden_files()
        yield
    except (ImportError, MemoryError, OSError, ValueError, OmegaConfBaseException) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        line = "; ".join(map(str.strip, str(error).splitlines()))  # OmegaConf names the place on a separate line
        raise SystemExit(f"error: {line} (HYDRA_FULL_ERROR=1 shows where)") from error


def together(action: Callable[P, T]) -> Callable[P, T]:
    """Run a function in every process of torchrun: an error in one is raised in all."""
    return wraps(action)(lambda *args, **kwargs: distributed.on_all_ranks(lambda: action(*args, **kwargs)))


@together
def open_cell(config: DictConfig) -> Cell:
    """Check everything and load the network. Raises `ValueError` or an `OSError` that says what to change."""
    cell = Cell.of(config)
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision(config.hardware.matmul_precision)
    torch.backends.cudnn.allow_tf32 = config.hardware.matmul_precision != "highest"  # the same for convolutions
    if config.hardware.num_threads:
        torch.set_num_threads(config.hardware.num_threads)
    model = cell.model  # loaded now, with the seed set
    if cell.analysis:
        cell.analysis.check(model, cell.method.needed_estimator)
    return cell


@together
def collect_moments(cells: list[Cell]) -> None:
    """Cache what unfinished cells with the same network and data need: a pass per `fit_bias`, and one for analyses."""
    cached = [cell for cell in cells if cell.config.cache and cell.method.needed_estimator]
    records = distributed.on_main_rank(lambda: [cell.earlier_record() for cell in cached])
    unfinished = [cell for cell, record in zip(cached, records, strict=True) if not record or record.status != "done"]
    for fit_bias in (False, True):  # their moments are of different inputs
        alike = [cell for cell in unfinished if cell.config.fit_bias == fit_bias]
        if estimators := [cell.method.needed_estimator for cell in alike if cell.method.needed_estimator]:
            alike[0].calibration.collect(estimators)
    analysed = [cell for cell in unfinished if cell.analysis and cell.analysis.needs_factors]
    wanted = [cell.method.needed_estimator for cell in analysed if cell.method.needed_estimator]
    if moments := list(dict.fromkeys(moment for estimator in wanted for moment in estimator.moments)):
        data, _ = analysed[0].task.analysis(analysed[0].model)
        analysed[0].calibration.on(data).moments(moments)  # in one pass for all layers, as analyses read them


@together
def run_cell(cell: Cell, wait: bool = True) -> Record:
    """Run a cell unless it is done. If another process runs it, wait, or raise `HeldElsewhere` without `wait`."""
    with distributed.held_by_main_rank(locked(cell.folder / "locks" / f"{cell.fingerprint}.lock", wait)):
        earlier = earlier_record(cell)
        if earlier and earlier.status == "done":
            log.info("%s (%s) was done on %s", cell.words, cell.fingerprint, earlier.time)
            return earlier
        return attempt(cell, earlier.attempt + 1 if earlier else 1)


def earlier_record(cell: Cell) -> Record | None:
    return distributed.on_main_rank(cell.earlier_record)


def attempt(cell: Cell, number: int) -> Record:
    """Run a cell and write its record. A failure is recorded and raised again."""
    log.info("%s (%s) runs, attempt %d", cell.words, cell.fingerprint, number)
    config = cell.config
    base = Record(
        fingerprint=cell.fingerprint,
        status="failed",
        config=cast(dict[str, Any], OmegaConf.to_container(config, resolve=True)),
        identity=cell.identity,
        model_hash=cell.model_hash,
        data_hash=cell.data_hash,
        weights=cell.recipe.provenance(),
        attempt=number,
    )
    group = config.tracking.group or (config.experiment.name if config.experiment else None)
    shown = {"name": cell.words, "tags": cell.words.split(" · "), "group": group, "config": base.config}
    tracking = config.tracking if distributed.is_main_rank() else Tracking(mode="disabled")
    with tracked(tracking, cell.folder, base.run_id, **shown) as track:
        try:
            with reporting_to(lambda stage, values: track(lambda run: log_stage(run, stage, values))):
                record = replace(base, status="done", **measure(cell))
        except Exception as error:
            failure = replace(base, error=traceback.format_exc())
            distributed.on_main_rank(lambda: write_record(failure, cell.records))
            error.add_note(f"see {cell.records / cell.fingerprint}.json")
            raise
        distributed.on_main_rank(lambda: write_record(record, cell.records))
        distributed.on_main_rank(lambda: save_images(cell))
        track(lambda run: log_record(run, record))
    return record


@together
def measure(cell: Cell) -> dict[str, Any]:
    """Make the network and evaluate it; return the fields of its record."""
    if cell.method.is_made_once:
        product = distributed.on_main_rank(lambda: cell.method.produce(cell))
        product = replace(product, model=product.model.to(cell.config.hardware.device))
    else:
        product = cell.method.produce(cell)
    if cell.finetuning:
        product = trained(product, cell)
    model, seconds = product.model, dict(product.seconds)
    with timed(seconds, "evaluation"):
        evaluation = cell.task.evaluate(model, cell.execution.precision)
    assert product.cost.flops is not None  # the shape is known
    cost = {"gflops": product.cost.flops / 1e9, "mparams": product.cost.params / 1e6}
    metrics = {**evaluation, **cost, **product.metrics}
    outcomes = {metric: packed(values) for metric, values in evaluation.outcomes.items()}
    fields: dict[str, Any] = {"outcomes": outcomes, "plan": product.plan, "summary": product.summary}
    if analysis := cell.analysis:
        with alone() if analysis.depends_on_device else nullcontext(), timed(seconds, "analysis"):
            findings = distributed.on_main_rank(lambda: analysis.run(subject_of(cell, model)))
        metrics |= findings.metrics
        fields["analysis"] = findings.values
    return {**fields, "metrics": metrics, "seconds": seconds}


def trained(product: Product, cell: Cell) -> Product:
    """Train a network by the cell's recipe: on the task's training data, or on calibration inputs without labels."""
    model, summary, original, folder = product.model, product.summary, cell.model, cell.folder / "finetuning"
    if isinstance(cell.finetuning, Recovery):
        data, error = division(cell.task.calibration(original), original), cell.task.output_error
        model, recovery, distance = cell.finetuning.teach(model, original, data, error, folder)
        summary, seconds = summary and replace(summary, recovery=recovery, distance=distance), recovery.seconds
    else:
        assert cell.finetuning
        model = copy.deepcopy(model) if model is original else model
        seconds = finetune(model, original, cell.task, cell.finetuning, folder).seconds
    report("finetuning", seconds=seconds)
    seconds += product.seconds.get("finetuning", 0.0)
    return replace(product, model=model, summary=summary, seconds={**product.seconds, "finetuning": seconds})


def subject_of(cell: Cell, result: nn.Module) -> Subject:
    """Make the subject of the cell's analysis."""
    calibration, held_out = cell.task.analysis(cell.model)
    return Subject(
        calibration=cell.calibration.on(calibration),
        held_out=cell.calibration.on(held_out),
        estimator=cell.method.needed_estimator,
        compressed=None if result is cell.model else result,
    )


def save_images(cell: Cell) -> None:
    """Record, under the data's hash, the images behind the factors and the sensitivities, if the task lists them."""
    path = cell.folder / "images" / f"{cell.data_hash}.json"
    if (chosen := cell.task.chosen_images()) and not path.exists():
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(chosen))


def log_stage(run: Any, stage: str, values: dict[str, float]) -> None:
    """Log a stage that has ended, or an epoch of it, as a step of the W&B history."""
    run.log({"stage": stage, **{f"{name}/{stage}": value for name, value in values.items()}})


def log_record(run: Any, record: Record) -> None:
    """Log metrics, timings and the plan of a record as a W&B summary and table."""
    import wandb

    seconds = {f"seconds/{stage}": seconds for stage, seconds in record.seconds.items()}
    run.summary.update({**record.metrics, **seconds, "repaired": record.num_repaired})
    run.log({"plan": wandb.Table(columns=["layer", "rank"], data=[list(item) for item in record.plan.items()])})
