"""One cell: a checked configuration, its fingerprint, and its record once it has run."""

import copy
import json
import logging
import traceback
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import hydra
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from experiments.record import Record, machine, read_record, write_record
from experiments.tracking import tracked
from facts import parallel
from facts.analysis import Analysis, Subject
from facts.budget import all_bounds
from facts.cache import content_key
from facts.compression import compress, timed
from facts.cost import Cost, count_cost
from facts.estimators import Estimator
from facts.files import locked, replacing, writable_folder
from facts.finetuning import Finetuning, Stages, finetune, train_in_stages
from facts.hardware import TimingPolicy
from facts.layers import select_layers
from facts.losses import Loss, SampledLabels
from facts.memory import MemoryPolicy
from facts.pruning import Pruner, PruningProblem
from facts.search import Search
from facts.tasks import Task
from facts.version import __version__

log = logging.getLogger(__name__)

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LABELS = ("given", "sampled")
MATMUL_PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True)
class Cell:
    """A configuration whose parts exist and are within range; without `estimator` and `pruner` the network is dense."""

    config: DictConfig
    model: nn.Module
    task: Task
    estimator: Estimator | None
    search: Search
    analysis: Analysis | None = None
    pruner: Pruner | None = None
    finetuning: Finetuning | None = None
    stages: Stages | None = None

    @classmethod
    def of(cls, config: DictConfig) -> "Cell":
        """Check everything before any work starts. Raises `ValueError` or an `OSError` that says what to change."""
        check(config)
        set_up(config)
        profile = config.profile.name
        search = instantiate(config.search)
        task = load_task(json.dumps(OmegaConf.to_container(config.task[profile], resolve=True)))
        estimator = instantiate(config.estimator) if config.estimator["_target_"] else None
        others = (config.analysis, config.pruning, config.finetuning)
        analysis, pruner, finetuning = (instantiate(node[profile]) if node else None for node in others)
        stages = config.stages and Stages(**{part: instantiate(node[profile]) for part, node in config.stages.items()})
        recipe = json.dumps(OmegaConf.to_container(config.model[profile], resolve=True))
        model = load_model(recipe, config.hardware.device)
        if analysis:
            analysis.check(model, estimator)
        return cls(config, model, task, estimator, search, analysis, pruner, finetuning, stages)

    @cached_property
    def model_hash(self) -> str:
        return content_key(self.model)

    @cached_property
    def data_hash(self) -> str:
        return self.task.content_key(self.model)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that the result depends on: the same cell is never run twice."""
        return content_key(__version__, self.identity(), self.model_hash, self.data_hash)

    @property
    def records(self) -> Path:
        return writable_folder(self.folder / "records")

    def earlier_record(self) -> Record | None:
        return read_record(self.fingerprint, self.records)

    @property
    def folder(self) -> Path:
        return Path(self.config.results) / self.config.profile.name

    @property
    def cache(self) -> Path | None:
        return self.folder / "cache" if self.config.cache else None

    @property
    def loss(self) -> Loss:
        """What gradients are taken of."""
        return SampledLabels(self.task.loss, self.config.seed) if self.config.labels == "sampled" else self.task.loss

    @property
    def precision(self) -> torch.dtype:
        return PRECISIONS[self.config.hardware.precision]

    @property
    def memory(self) -> MemoryPolicy:
        return MemoryPolicy(**self.config.hardware.memory)

    @property
    def depends_on_device(self) -> bool:
        """Whether something is timed."""
        by_analysis = self.analysis is not None and self.analysis.depends_on_device
        return by_analysis or "latency" in (self.config.cost, *self.config.bounds)

    def identity(self) -> dict[str, Any]:
        """What a result depends on: neither the tracking, nor where files lie, nor the device unless it is timed."""
        config = self.config
        numerics = {
            "precision": config.hardware.precision,
            "matmul_precision": config.hardware.matmul_precision,
        }
        what = {
            "model": config.model.name,
            "task": config.task.name,
            "profile": config.profile.name,
            "seed": config.seed,
            "labels": config.labels,
            "analysis": self.analysis and repr(self.analysis),
        }
        if self.depends_on_device:
            what |= {"machine": machine(), "num_threads": torch.get_num_threads()}
        if self.finetuning:
            what["finetuning"] = self.finetuning.identity()
        if self.stages:
            what["stages"] = {"classifier": self.model.recipe.classifier.origin(), **self.stages.identity()}
        if self.pruner:
            return {**what, **numerics, "pruning": repr(self.pruner), "ratio": config.ratio, "cost": config.cost}
        if self.estimator is None:
            return {**what, **numerics, "estimator": None}
        compression = {key: OmegaConf.to_container(config[key], resolve=True) for key in ("estimator", "search")}
        budget = {"ratio": config.ratio, "cost": config.cost, "bounds": dict(config.bounds)}
        return {**what, **numerics, **compression, **budget, "cache": config.cache}


def check(config: DictConfig) -> None:
    """The top-level values. Raises `ValueError` with the field's name."""
    all_bounds(config.ratio, config.cost, config.bounds)
    if config.stages and not config.estimator["_target_"]:
        raise ValueError("stages begin with a compression: choose an estimator beside it")
    if config.pruning and (config.estimator["_target_"] or config.bounds):
        raise ValueError("pruning takes an estimator's place: choose estimator=none, and bounds={}, beside it")
    for field, value, allowed in (
        ("labels", config.labels, LABELS),
        ("hardware.precision", config.hardware.precision, PRECISIONS),
        ("hardware.matmul_precision", config.hardware.matmul_precision, MATMUL_PRECISIONS),
    ):
        if value not in allowed:
            raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {value!r}")
    if config.hardware.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("hardware=cuda, but torch sees no GPU here; choose hardware=cpu or install the driver")


def instantiate(node: DictConfig | ListConfig) -> Any:
    """Build what a node's `_target_` names, from plain containers; errors are those of the thing itself."""
    try:
        return hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        raise error.__cause__ or error from None


@lru_cache(maxsize=1)
def load_model(recipe: str, device: str) -> nn.Module:
    """The network of a recipe in JSON; the last one is kept, since the cells of a column share it."""
    return instantiate(OmegaConf.create(recipe)).build().to(device)


@lru_cache(maxsize=1)
def load_task(recipe: str) -> Task:
    """The task of a recipe in JSON; the last one is kept, with what it knows of millions of files."""
    return instantiate(OmegaConf.create(recipe))


def run_cell(cell: Cell, wait: bool = True) -> Record:
    """Run a cell, or return its record where it is done already. A failure is recorded and raised again.

    A cell that another process runs is waited for; without `wait` it raises `facts.files.HeldElsewhere`. Processes that
    torchrun started run it together, and the main one writes.
    """
    with parallel.main_holds(locked(cell.folder / "locks" / f"{cell.fingerprint}.lock", wait)):
        earlier = parallel.from_main(cell.earlier_record)
        if earlier and earlier.status == "done":
            log.info("%s was done on %s", cell.fingerprint, earlier.time)
            return earlier
        return attempt(cell, earlier.attempt + 1 if earlier else 1)


def attempt(cell: Cell, number: int) -> Record:
    """Run a cell and write its record, of a failure too, which is raised again."""
    log.info("%s runs, attempt %d", cell.fingerprint, number)
    config = cell.config
    base = Record(
        fingerprint=cell.fingerprint,
        status="failed",
        config=cast(dict[str, Any], OmegaConf.to_container(config, resolve=True)),
        model_hash=cell.model_hash,
        data_hash=cell.data_hash,
        weights=cell.model.recipe.origin(),
        attempt=number,
    )
    group = config.experiment.name if config.experiment else None
    run_id = f"{cell.fingerprint}-{number}"
    with tracked(config.tracking, cell.folder, run_id, group=group, config=base.config) as track:
        try:
            record = replace(base, status="done", **parallel.everywhere(lambda: measure(cell)))
        except Exception:
            failure = replace(base, error=traceback.format_exc())
            parallel.from_main(lambda: write_record(failure, cell.records))
            raise
        parallel.from_main(lambda: write_record(record, cell.records))
        parallel.from_main(lambda: save_images(cell))
        track(lambda run: log_record(run, record))
    return record


def save_images(cell: Cell) -> None:
    """Which images gave the factors and the sensitivities, under the data's hash, where the task tells."""
    path = cell.folder / "images" / f"{cell.data_hash}.json"
    if (chosen := cell.task.chosen_images()) and not path.exists():
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(chosen))


def set_up(config: DictConfig) -> None:
    """Process-wide settings: seed, threads, precision of matrix products."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision(config.hardware.matmul_precision)
    if config.hardware.num_threads:
        torch.set_num_threads(config.hardware.num_threads)


def measure(cell: Cell) -> dict[str, Any]:
    """Compress and evaluate: the fields of the record that this yields."""
    shape = cell.task.input_shape(cell.model)
    if cell.stages:
        model, cost, outcome = train_cell(cell, cell.stages, shape)
    elif cell.pruner:
        model, cost, outcome = prune_cell(cell, cell.pruner, shape)
    elif cell.estimator:
        model, cost, outcome = compress_cell(cell, shape)
    else:
        model, cost, outcome = cell.model, count_cost(cell.model, shape), {"seconds": {}}
    if cell.finetuning:
        model = copy.deepcopy(model) if model is cell.model else model
        with timed(outcome["seconds"], "finetuning"):
            finetune(model, cell.model, cell.task, cell.finetuning, cell.folder / "finetuning")
    with timed(outcome["seconds"], "evaluation"):
        metrics = cell.task.evaluate(model, cell.precision)
    assert cost.flops is not None  # the shape is known
    metrics |= {"gflops": cost.flops / 1e9, "mparams": cost.params / 1e6, **outcome.pop("metrics", {})}
    if analysis := cell.analysis:
        with timed(outcome["seconds"], "analysis"):
            findings = parallel.from_main(lambda: analysis.run(subject_of(cell, model)))
        metrics |= findings.metrics
        outcome["analysis"] = findings.values
    return {**outcome, "metrics": metrics}


def subject_of(cell: Cell, result: nn.Module) -> Subject:
    """What the cell's analysis looks at."""
    calibration, held_out = cell.task.analysis(cell.model)
    return Subject(
        model=cell.model,
        layers=select_layers(cell.model),
        calibration=calibration,
        held_out=held_out,
        loss=cell.loss,
        precision=cell.precision,
        estimator=cell.estimator,
        compressed=None if result is cell.model else result,
        memory=cell.memory,
        cache=cell.cache,
    )


def compress_cell(cell: Cell, input_shape: tuple[int, ...]) -> tuple[nn.Module, Cost, dict[str, Any]]:
    """The compressed network, its cost, and what the record says of how it came about."""
    assert cell.estimator is not None
    config = cell.config
    result = compress(
        cell.model,
        cell.task.calibration(cell.model),
        estimator=cell.estimator,
        search=cell.search,
        ratio=config.ratio,
        cost=config.cost,
        bounds=dict(config.bounds),
        sensitivity=cell.task.sensitivity(cell.model),
        loss=cell.loss,
        output_error=cell.task.output_error,
        precision=cell.precision,
        memory=cell.memory,
        timing=TimingPolicy(**cell.config.hardware.timing),
        input_shape=input_shape,
        cache=cell.cache,
    )
    summary, metrics = result.summary, {}
    if "flops" in summary.budget and summary.after.flops is not None:
        metrics["gflops_budget"] = (summary.after.flops + summary.budget["flops"] - summary.spent["flops"]) / 1e9
    if latency := summary.latency:  # in percent of the original's
        metrics |= {f"{name}_latency": 100 * latency[name] / latency["dense"] for name in ("predicted", "measured")}
    fields = ("repaired", "spent", "budget", "latency", "solution", "profile")
    outcome = {"plan": result.plan, "seconds": dict(summary.seconds), "metrics": metrics}
    return result.model, summary.after, outcome | {name: getattr(summary, name) for name in fields}


def prune_cell(cell: Cell, pruner: Pruner, input_shape: tuple[int, ...]) -> tuple[nn.Module, Cost, dict[str, Any]]:
    """The pruned network, which the main process makes for all, its cost, and the time that it took."""
    calibration = cell.task.calibration(cell.model)
    ratio, cost = cell.config.ratio, cell.config.cost
    problem = PruningProblem(cell.model, calibration, ratio, input_shape, cost, cell.loss, cell.precision)
    seconds: dict[str, float] = {}
    with timed(seconds, "pruning"):
        model = parallel.from_main(lambda: pruner.prune(problem).cpu())
    model = model.to(next(cell.model.parameters()).device)
    return model, count_cost(model, input_shape), {"seconds": seconds}


def train_cell(cell: Cell, stages: Stages, input_shape: tuple[int, ...]) -> tuple[nn.Module, Cost, dict[str, Any]]:
    """The network trained on a compressed backbone, its cost, and the backbone's plan."""
    compression = {
        "estimator": cell.estimator,
        "search": cell.search,
        "ratio": cell.config.ratio,
        "cost": cell.config.cost,
        "bounds": dict(cell.config.bounds),
        "memory": cell.memory,
        "precision": cell.precision,
    }
    folder = cell.folder / "finetuning"
    model, plan, seconds = train_in_stages(cell.model, cell.task, stages, compression, folder)
    return model, count_cost(model, input_shape), {"plan": plan, "seconds": seconds}


def log_record(run: Any, record: Record) -> None:
    """Metrics, timings and the plan of a record as a W&B summary and table."""
    import wandb

    run.summary.update({**record.metrics, "seconds": record.seconds, "repaired": sum(record.repaired.values())})
    run.log({"plan": wandb.Table(columns=["layer", "rank"], data=[list(item) for item in record.plan.items()])})
