"""One cell: a checked configuration, its parts, and the fingerprint of everything that its result depends on."""

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from experiments.config import EXTRAS, TASKS, as_json, checked, how_to_install, instantiate, missing_packages, plain
from experiments.methods import Method, method_of
from experiments.record import MINUTES, Record, machine, read_record
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
from facts.parts import kinds_of
from facts.pruning import PRUNERS
from facts.search import SEARCHES
from facts.tasks.base import Task
from facts.utils.cache import code_of, content_key
from facts.utils.files import at_home, writable_folder
from facts.utils.version import RESULTS

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROFILES = ("mini", "photos", "paper")
LABELS = ("given", "sampled")
MATMUL_PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True)
class Cell:
    """A configuration whose parts exist and are within range. The network is built on first use."""

    config: DictConfig
    recipe: Recipe
    task: Task
    method: Method
    analysis: Analysis | None = None
    finetuning: Finetuning | Recovery | None = None

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        """Build all parts except the network. Raises `ValueError` or an `OSError` that says what to change."""
        check(config)
        refuse_missing_packages(config)
        profile = config.profile.name
        for group in ("model", "task", "analysis", "pruning", "finetuning"):
            refuse_other_profiles(group, config[group], profile)
        recipe = instantiate(config.model[profile], kind=Recipe)
        refuse_other_tasks(recipe, config)
        analysis, finetuning = (
            instantiate(node[profile]) if node else None for node in (config.analysis, config.finetuning)
        )
        if analysis and analysis.reads_layers and config.parts != "layers":
            raise ValueError("this analysis covers only layers and their inputs: choose parts=layers with it")
        method = method_of(config)
        kinds_of(config.parts)  # now that a user's own, beside a method, are known
        return cls(
            config=config,
            recipe=recipe,
            task=load_task(as_json(config.task[profile]), f"task.{profile}"),
            method=method,
            analysis=analysis,
            finetuning=finetuning,
        )

    @cached_property
    def model(self) -> nn.Module:
        return load_model(as_json(self.config.model[self.config.profile.name]), self.config.hardware.device)

    @cached_property
    def calibration(self) -> PreparedModel:
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
        return without_others(plain(self.config), self.config.profile.name)

    @property
    def words(self) -> str:
        """The cell in words: its network, method and ratio, and any later steps."""
        names: dict[type, str] = {
            kind: name for kinds in (ESTIMATORS, SEARCHES, PRUNERS) for name, kind in kinds.items()
        }
        made = [names.get(type(choice), type(choice).__name__) for choice in self.method.choices]
        if made:
            made += [str(self.config.ratio), *(kind for kind in self.config.parts.split(",") if kind != "layers")]
            made += [self.config.form] * (self.config.form != "plain")
        stages = ["in stages"] if self.config.stages else []
        after = [node.name for node in (self.config.finetuning, self.config.analysis) if node]
        return " · ".join([self.config.model.name, *(made or ["dense"]), *stages, *after])

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Settings that a result depends on: no tracking or paths, and the device only if something is timed."""
        config, hardware = self.config, self.config.hardware
        identity = {
            "results": RESULTS,
            "model": config.model.name,
            "task": config.task.name,
            "profile": config.profile.name,
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
        return identity | numerics | self.method.identity(self.recipe)

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
        memory, timing = checked(MemoryPolicy, hardware.memory), checked(TimingPolicy, hardware.timing)
        return Execution(PRECISIONS[hardware.precision], memory, timing, cache_errors=self.config.cache is True)


def without_others(node: Any, profile: str) -> Any:
    """Leave the other profiles' recipes out of a configuration."""
    if not isinstance(node, dict):
        return node
    others = {*PROFILES} - {profile} if "paper" in node else ()
    return {name: without_others(value, profile) for name, value in node.items() if name not in others}


def results_folder(config: DictConfig) -> Path:
    """Folder with the records, caches, tables and figures of a configuration's profile."""
    return at_home(config.results) / config.profile.name


def check(config: DictConfig) -> None:
    """Check the top-level values. Raises `ValueError` with the field's name."""
    for field, value, allowed in (
        ("profile.name", config.profile.name, PROFILES),
        ("labels", config.labels, LABELS),
        ("form", config.form, FORMS),
        ("cache", config.cache, (True, False, "decompositions")),
        ("tracking.mode", config.tracking.mode, ("online", "offline", "disabled")),
        ("hardware.precision", config.hardware.precision, PRECISIONS),
        ("hardware.matmul_precision", config.hardware.matmul_precision, MATMUL_PRECISIONS),
    ):
        if value not in allowed:
            raise ValueError(f"{field} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    threads = config.hardware.num_threads
    for field, value, among in (("seed", config.seed, range(2**32)), ("hardware.num_threads", threads, range(1, 4096))):
        if value is not None and value not in among:
            raise ValueError(f"{field} must be an integer from {among[0]} to {among[-1]}, got {value}")
    checked(MemoryPolicy, config.hardware.memory)
    checked(TimingPolicy, config.hardware.timing)
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


def refuse_other_profiles(group: str, node: DictConfig | None, profile: str) -> None:
    """Raise `ValueError` for a choice without settings for the profile."""
    has = [name for name in PROFILES if node and not OmegaConf.is_missing(node, name) and node[name] is not None]
    if node and profile not in has:
        raise ValueError(f"{group}={node.name} has no settings for profile={profile}, only for {' and '.join(has)}")


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
    return instantiate(OmegaConf.create(recipe), key, Task)
