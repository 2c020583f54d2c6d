"""Methods that make a cell's network: dense, low-rank, pruned, or trained in stages."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig
from torch import nn

from experiments.config import instantiate, of_profile, plain
from facts.calibration.prepare import prepare
from facts.calibration.prepared_model import Execution, PreparedModel
from facts.compression.plan import compress_prepared
from facts.cost.count import Cost, count_cost
from facts.estimators import Estimator
from facts.finetuning import Finetuning, finetune
from facts.models import Recipe
from facts.models.openmmlab import untrained
from facts.parts import Plan
from facts.pruning import Pruner, PruningProblem
from facts.pruning.base import PrunedCost
from facts.result import Summary
from facts.search.base import Search
from facts.search.budget import Budget
from facts.tasks.base import Task
from facts.utils.progress import timed

# Fields that the result of a compression depends on.
OPTIONS = ("estimator", "search", "bounds", "excluded_names", "parts", "form", "ratio", "cost", "cache")


class Context(Protocol):
    """Network, data and settings for a method; a `Cell` provides them."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def task(self) -> Task: ...
    @property
    def prepared(self) -> PreparedModel: ...
    @property
    def execution(self) -> Execution: ...
    @property
    def folder(self) -> Path: ...


@dataclass(frozen=True)
class CompressedModel:
    """A network made by a method, its cost, and details of how it was made."""

    model: nn.Module
    cost: Cost
    plan: Plan = field(default_factory=dict)
    summary: Summary | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Method(ABC):
    """A way to make a network."""

    @abstractmethod
    def produce(self, context: Context) -> CompressedModel:
        """Make the network."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return all that the network depends on besides the cell's network, data and numerics."""

    @property
    def needed_estimator(self) -> Estimator | None:
        """The estimator whose factors are needed for the cell's own data, if any."""
        return None

    @property
    def choices(self) -> tuple[Hashable, ...]:
        """The configured parts that are defined in their own files."""
        return ()

    @property
    def depends_on_device(self) -> bool:
        """Whether something is timed."""
        return False


@dataclass(frozen=True)
class Dense(Method):
    """The unchanged network."""

    def produce(self, context: Context) -> CompressedModel:
        return CompressedModel(context.model, count_cost(context.model, context.task.input_shape(context.model)))

    def identity(self) -> dict[str, Any]:
        return {"estimator": None}


@dataclass(frozen=True)
class LowRank(Method):
    """Compression with an estimator and a search; `options` are as configured."""

    estimator: Estimator
    search: Search
    budget: Budget
    options: dict[str, Any]

    def produce(self, context: Context) -> CompressedModel:
        sensitivity = context.task.sensitivity(context.model)
        result = compress_prepared(context.prepared, self.estimator, self.search, self.budget, sensitivity)
        summary = result.summary
        return CompressedModel(result.model, summary.after, result.plan, summary, summary.seconds, _metrics(summary))

    def identity(self) -> dict[str, Any]:
        return self.options

    @property
    def needed_estimator(self) -> Estimator | None:
        return self.estimator

    @property
    def choices(self) -> tuple[Hashable, ...]:
        return (self.estimator, self.search)

    @property
    def depends_on_device(self) -> bool:
        return "latency" in self.budget.ratios


def _metrics(summary: Summary) -> dict[str, float]:
    """Metrics of the budget: GFLOPs allowed, and latencies in percent of the original's."""
    metrics = {}
    if "flops" in summary.budget and summary.after.flops is not None:
        metrics["gflops_budget"] = (summary.after.flops + summary.budget["flops"] - summary.spent["flops"]) / 1e9
    if latency := summary.latency:
        metrics |= {f"{name}_latency": 100 * latency[name] / latency["dense"] for name in ("predicted", "measured")}
    return metrics


@dataclass(frozen=True)
class Pruned(Method):
    """Structured pruning of the whole network to a ratio of its cost."""

    pruner: Pruner
    ratio: float
    cost: PrunedCost

    def produce(self, context: Context) -> CompressedModel:
        shape = context.task.input_shape(context.model)
        seconds: dict[str, float] = {}
        problem = PruningProblem(context.prepared, self.ratio, shape, self.cost)
        with timed(seconds, "pruning"):
            model = self.pruner.prune(problem)
        return CompressedModel(model, count_cost(model, shape), seconds=seconds)

    @property
    def choices(self) -> tuple[Hashable, ...]:
        return (self.pruner,)

    def identity(self) -> dict[str, Any]:
        return {"pruning": repr(self.pruner), "ratio": self.ratio, "cost": self.cost}


@dataclass(frozen=True)
class Staged(Method):
    """PELA's protocol (paper, supplement): a compressed classifier is the backbone of a network with new heads.

    The classifier is compressed and retrained on its own `task`, with the dense one as its teacher; then its backbone
    and untrained heads learn the cell's task.
    """

    compression: LowRank
    classifier: Recipe
    task: Task
    retraining: Finetuning
    training: Finetuning

    def produce(self, context: Context) -> CompressedModel:
        low_rank, network, folder = self.compression, context.model, context.folder / "finetuning"
        device = next(network.parameters()).device
        classifier = self.classifier.build().to(device)
        options = {name: low_rank.options[name] for name in ("excluded_names", "form")}
        prepared = prepare(classifier, self.task.calibration(classifier), execution=context.execution, **options)
        result = compress_prepared(prepared, low_rank.estimator, low_rank.search, low_rank.budget)
        seconds = dict(result.summary.seconds)
        with timed(seconds, "retraining"):
            finetune(result.model, classifier, self.task, self.retraining, folder)
        model = untrained(network.recipe, result.model, self.training.seed).to(device)
        with timed(seconds, "finetuning"):
            finetune(model, network, context.task, self.training, folder)
        cost = count_cost(model, context.task.input_shape(network))
        return CompressedModel(model, cost, result.plan, seconds=seconds)

    @property
    def choices(self) -> tuple[Hashable, ...]:
        return self.compression.choices

    def identity(self) -> dict[str, Any]:
        stages = {
            "classifier": self.classifier.provenance(),
            "task": repr(self.task),
            "retraining": self.retraining.identity(),
            "training": self.training.identity(),
        }
        return self.compression.options | {"stages": stages}


def method_of(config: DictConfig) -> Method:
    """Build the method of a configuration. Raises `ValueError` for parts that exclude each other."""
    has_estimator = bool(config.estimator["_target_"])
    bounds = {cost: ratio for cost, ratio in config.bounds.items() if ratio is not None}
    budget = Budget.of(config.ratio, config.cost, bounds)
    if config.stages and not has_estimator:
        raise ValueError("stages begin with a compression: choose an estimator with them")
    if config.pruning:
        if has_estimator or bounds:
            raise ValueError("pruning replaces the estimator: choose estimator=none, and no bounds, with it")
        return Pruned(instantiate(of_profile(config, "pruning"), kind=Pruner), config.ratio, config.cost)
    if not has_estimator:
        return Dense()
    low_rank = LowRank(
        estimator=instantiate(config.estimator, kind=Estimator),
        search=instantiate(config.search, kind=Search),
        budget=budget,
        options={key: plain(config[key]) for key in OPTIONS},
    )
    if not config.stages:
        return low_rank
    if config.parts != "layers":
        raise ValueError("stages train low-rank layers: choose parts=layers with them")
    stages = {part: instantiate(node[config.profile.name]) for part, node in config.stages.items()}
    recipe = instantiate(of_profile(config, "model"))
    return Staged(low_rank, recipe.classifier, **stages)
