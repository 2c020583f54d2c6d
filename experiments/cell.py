"""One cell: a configuration and its place in a table, its parts, its state, and the fingerprint of its result."""

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import nn

from experiments.compose import composed, given_to_cells
from experiments.config import (
    EXTRAS,
    PROFILES,
    TASKS,
    USER_ERRORS,
    Experiment,
    as_json,
    build,
    from_fields,
    how_to_install,
    in_a_line,
    instantiate,
    missing_packages,
    of_profile,
    plain,
)
from experiments.methods import Method, method_of
from experiments.record import MINUTES, Record, Status, key_of, latest_records, machine, read_record
from facts.analysis.base import Analysis
from facts.calibration.prepare import prepare
from facts.calibration.prepared_model import Execution, PreparedModel
from facts.cost.timing import TimingPolicy
from facts.estimators import ESTIMATORS
from facts.finetuning import Finetuning, Recovery
from facts.models import CausalLM, OpenMMLabModel, Recipe
from facts.modules.forms import FORMS
from facts.modules.networks import is_encoder
from facts.moments.collect import MemoryPolicy
from facts.moments.losses import SampledLabels
from facts.parts import kinds_of, results_of
from facts.pruning import PRUNERS
from facts.search import SEARCHES
from facts.tasks.base import Task
from facts.utils.cache import code_of, content_key
from facts.utils.files import at_home, writable_folder

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class State(NamedTuple):
    """State of a cell's result, with the reason if the cell failed or is blocked."""

    name: Literal["done", "failed", "to do", "blocked"]
    why: str = ""


@dataclass(eq=False)
class Cell:
    """A configuration, its place in a table, and its record; or why it cannot run (`fault`), or why its run failed.

    Its parts are built on first use. They raise `ValueError`, `ImportError` or an `OSError` that says what to change.
    """

    config: DictConfig
    experiment: str = ""
    row: str = ""
    column: str = ""
    draw: int = 0
    record: Record | None = None
    fault: str = ""
    error: str = ""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was built from the configuration, so that copies build it anew."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def status(self) -> Status:
        if self.error:
            return "failed"
        return self.record.status if self.record else "missing"

    def state(self) -> State:
        """Return the state that `recall` found, or that of a run since."""
        if self.error:
            return State("failed", self.error)
        if self.record:
            return State(self.record.status, (self.record.error or "").strip().rpartition("\n")[2])
        return State("blocked", self.fault) if self.fault else State("to do")

    @property
    def is_left(self) -> bool:
        """Whether it is to do, or to be tried again."""
        return self.state().name in ("to do", "failed")

    def check(self) -> None:
        """Build all parts except the network."""
        check_values(self.config)
        refuse_missing_packages(self.config)
        refuse_other_tasks(self.recipe, self.config)
        if self.analysis and self.analysis.reads_layers and self.config.parts != "layers":
            raise ValueError("this analysis covers only layers and their inputs: choose parts=layers with it")
        _ = self.task, self.finetuning, self.method
        kinds_of(self.config.parts)  # now that a user's own, beside a method, are known

    @property
    def profile(self) -> str:
        return self.config.profile.name

    @cached_property
    def recipe(self) -> Recipe:
        return instantiate(of_profile(self.config, "model"), kind=Recipe)

    @cached_property
    def task(self) -> Task:
        return load_task(as_json(of_profile(self.config, "task")), f"task.{self.profile}")

    @cached_property
    def method(self) -> Method:
        return method_of(self.config)

    @cached_property
    def analysis(self) -> Analysis | None:
        node = of_profile(self.config, "analysis")
        return node and instantiate(node, kind=Analysis)

    @cached_property
    def finetuning(self) -> Finetuning | Recovery | None:
        node = of_profile(self.config, "finetuning")
        return node and instantiate(node)

    @cached_property
    def model(self) -> nn.Module:
        return load_model(as_json(self.config.model[self.profile]), self.config.hardware.device)

    @cached_property
    def prepared(self) -> PreparedModel:
        """The network prepared for compression, with the task's data and the cache; an encoder by its features."""
        own: dict[str, Any] = {}
        if not is_encoder(self.model):
            loss, is_sampled = self.task.loss, self.config.labels == "sampled"
            own["loss"] = SampledLabels(loss, self.config.seed) if is_sampled else loss
            own["output_error"] = self.task.output_error
        return prepare(
            self.model,
            self.task.calibration(self.model),
            held_out=(),  # the task evaluates on its own data
            execution=replace(self.execution, cache=self.folder / "cache" if self.config.cache else None),
            input_shape=self.task.input_shape(self.model),
            excluded_names=self.config.excluded_names,
            parts=self.config.parts,
            form=self.config.form,
            **own,
        )

    @cached_property
    def model_hash(self) -> str:
        return content_key(self.model)

    @cached_property
    def data_hash(self) -> str:
        return self.task.content_key(self.model)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that the result depends on, so that no cell runs twice."""
        return content_key(self.identity, self.model_hash, self.data_hash)

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration for records: resolved, with the recipes of its own profile alone."""
        return without_others(plain(self.config), self.profile)

    @property
    def place(self) -> str:
        """Its table and its place there, in words; empty outside one."""
        draw = f"draw {self.draw + 1}" if self.draw else ""
        return ", ".join(filter(None, (self.experiment, self.row, self.column, draw)))

    @property
    def label(self) -> str:
        """Name of the network, method and ratio, and of any later steps."""
        known = (ESTIMATORS, SEARCHES, PRUNERS)
        names: dict[type, str] = {kind: name for kinds in known for name, kind in kinds.items()}
        made = [names.get(type(choice), type(choice).__name__) for choice in self.method.choices]
        if made:
            made += [str(self.config.ratio), *(kind for kind in self.config.parts.split(",") if kind != "layers")]
            made += [self.config.form] * (self.config.form != "plain")
        stages = ["in stages"] if self.config.stages else []
        after = [node.name for node in (self.config.finetuning, self.config.analysis) if node]
        return " · ".join([self.config.model.name, *(made or ["dense"]), *stages, *after])

    @property
    def data(self) -> str:
        """Network, choice of layers, data and labels as text: equal for cells that share a data pass."""
        parts = (plain(self.config[group][self.profile]) for group in ("model", "task"))
        return json.dumps([*parts, list(self.config.excluded_names), self.config.labels])

    @property
    def key(self) -> str:
        """Key of the cell in `latest_records`, without reading network or data."""
        recipe = as_json(self.config.model[self.profile])
        task = self.config.task[self.profile]
        return key_of(self.identity, weights_of(recipe), json.loads(recipe), task.get("num_calibration"))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Settings that a result depends on: no tracking or paths, and the device only if something is timed."""
        config, hardware = self.config, self.config.hardware
        identity = {
            "results": results_of(config.parts),
            "model": config.model.name,
            "task": config.task.name,
            "profile": self.profile,
            "seed": config.seed,
            "labels": config.labels,
            "analysis": self.analysis and repr(self.analysis),
        }
        kinds = [*map(type, self.method.choices)]
        own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("facts", "experiments")]
        if own:  # a user's, which change without RESULTS
            identity["own_methods"] = {kind.__name__: code_of(kind) for kind in own}
        if self.depends_on_device:
            num_threads = hardware.num_threads or torch.get_num_threads()
            identity |= {"machine": machine(num_threads), "num_threads": num_threads}
        if self.finetuning:
            identity["finetuning"] = self.finetuning.identity()
        numerics = {"precision": hardware.precision, "matmul_precision": hardware.matmul_precision}
        return identity | numerics | self.method.identity()

    @property
    def depends_on_device(self) -> bool:
        """Whether something is timed or has a time limit."""
        return bool(self.analysis and self.analysis.depends_on_device) or self.is_timed_throughout

    @property
    def is_timed_throughout(self) -> bool:
        """Whether the result depends on time besides that of an analysis of the finished network."""
        by_clock = self.finetuning and self.finetuning.minutes is not None
        return bool(by_clock or self.method.depends_on_device)

    @property
    def runs_alone(self) -> bool:
        """Whether no other cell may run beside it: its result depends on time, or its table shows its minutes."""
        experiment = self.config.experiment
        return self.is_timed_throughout or bool(experiment and {*MINUTES} & {*experiment.metrics})

    @property
    def folder(self) -> Path:
        return results_folder(self.config)

    @property
    def records(self) -> Path:
        return writable_folder(self.folder / "records")

    def earlier_record(self) -> Record | None:
        return read_record(self.fingerprint, self.records)

    @property
    def execution(self) -> Execution:
        hardware = self.config.hardware
        memory, timing = from_fields(MemoryPolicy, hardware.memory), from_fields(TimingPolicy, hardware.timing)
        return Execution(PRECISIONS[hardware.precision], memory, timing, cache_errors=self.config.cache is True)


def cells_of(experiment: Experiment) -> list[Cell]:
    """Compose the cell of every row, column and draw of a table, but of those that are not applicable.

    The first draw has the configuration's seed, the others the seeds that follow. The overrides in `mini` precede the
    row's. Raises `ValueError` for a row or column with a choice that no group has.
    """
    first = [*given_to_cells(experiment), *experiment.overrides]
    in_mini = experiment.mini if HydraConfig.get().runtime.choices["profile"] == "mini" else []
    draws, cells = range(experiment.seeds if experiment.metrics else 1), []
    for draw, (row, rows), (column, columns) in product(draws, experiment.rows.items(), experiment.columns.items()):
        if column in experiment.not_applicable.get(row, {}):
            continue
        try:
            config = composed(*first, *columns, *in_mini, *rows)
        except ValueError as error:
            raise ValueError(f"{experiment.name}, {row}, {column}: {error}") from error
        config.seed += draw
        cells.append(Cell(config, experiment.name, row, column, draw))
    return cells


def recall(cells: Iterable[Cell], folder: Path) -> dict[str, Record]:
    """Give cells their latest records of a folder, or the fault that blocks them; return all of these records.

    Networks and data are not read: only a run notices changed data.
    """
    records = latest_records(folder)
    for cell in cells:
        built = copy.copy(cell)  # its parts go with it
        try:
            built.check()
            cell.record = records.get(built.key)
        except USER_ERRORS as error:
            cell.fault = in_a_line(error)
    return records


def by_data(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Group cells by network and data."""
    groups = defaultdict(list)
    for cell in cells:
        groups[cell.data].append(cell)
    return list(groups.values())


def without_others(node: Any, profile: str) -> Any:
    """Leave the other profiles' recipes out of a configuration."""
    if not isinstance(node, dict):
        return node
    others = {*PROFILES} - {profile} if "paper" in node else ()
    return {name: without_others(value, profile) for name, value in node.items() if name not in others}


def results_folder(config: DictConfig) -> Path:
    """Folder with the records, caches, tables and figures of a configuration's profile."""
    return at_home(config.results) / config.profile.name


def check_values(config: DictConfig) -> None:
    """Check the top-level values. Raises `ValueError` with the field's name."""
    for field, value, allowed in (
        ("profile.name", config.profile.name, PROFILES),
        ("labels", config.labels, ("given", "sampled")),
        ("form", config.form, FORMS),
        ("cache", config.cache, (True, False, "decompositions")),
        ("tracking.mode", config.tracking.mode, ("online", "offline", "disabled")),
        ("hardware.precision", config.hardware.precision, PRECISIONS),
        ("hardware.matmul_precision", config.hardware.matmul_precision, ("highest", "high", "medium")),
    ):
        if value not in allowed:
            raise ValueError(f"{field} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    threads = config.hardware.num_threads
    for field, value, among in (("seed", config.seed, range(2**32)), ("hardware.num_threads", threads, range(1, 4096))):
        if value is not None and value not in among:
            raise ValueError(f"{field} must be an integer from {among[0]} to {among[-1]}, got {value}")
    from_fields(MemoryPolicy, config.hardware.memory)
    from_fields(TimingPolicy, config.hardware.timing)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", config.hardware.device):
        raise ValueError(f"hardware.device must be cpu, cuda or cuda:N, got {config.hardware.device!r}")
    if config.hardware.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("hardware=cuda, but torch sees no GPU here; choose hardware=cpu or install the driver")


def refuse_missing_packages(config: DictConfig) -> None:
    """Raise `ImportError` for a choice that needs packages which are not installed."""
    for group in ("task", "analysis", "pruning"):
        extra = EXTRAS.get(config[group].name) if config[group] else None
        if extra and (missing := missing_packages(extra)):
            raise ImportError(f"{group}={config[group].name} needs {', '.join(missing)}: {how_to_install(extra)}")


def refuse_other_tasks(recipe: Recipe, config: DictConfig) -> None:
    """Raise `ValueError` for one of our tasks that is for other kinds of networks."""
    suited = {"classification", "digits"}
    if isinstance(recipe, CausalLM | OpenMMLabModel):
        suited = {TASKS[recipe.toolbox] if isinstance(recipe, OpenMMLabModel) else "language"}
    if config.task.name in {*EXTRAS, "classification", "digits"} - suited:
        choice = " or ".join(sorted(suited))
        raise ValueError(f"task={config.task.name} does not suit model={config.model.name}: choose task={choice}")


@lru_cache(maxsize=1)
def load_model(recipe: str, device: str) -> nn.Module:
    """Build the network of a JSON recipe; the last one is kept, since the cells of a column share it."""
    return instantiate(OmegaConf.create(recipe)).build().to(device)


@lru_cache(maxsize=1)
def load_task(recipe: str, key: str) -> Task:
    """Build the task of a JSON recipe from the node `key`; the last one is kept, with its file lists."""
    return build(recipe, key, Task)


@lru_cache
def weights_of(recipe: str) -> dict[str, str]:
    """Provenance of a recipe's weights, cached because hashing a large file takes time."""
    return instantiate(OmegaConf.create(recipe)).provenance()
