"""The shape of a configuration: every key that exists, with its type. Methods check their own fields."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

CONF = str(Path(__file__).parents[1] / "conf")


@dataclass
class ByProfile:
    """A choice with one target a profile: what the paper uses, and what stands in for it."""

    name: str = MISSING
    title: str = ""
    paper: dict[str, Any] = MISSING
    mini: dict[str, Any] = MISSING


@dataclass
class Profile:
    name: str = MISSING
    comparable: bool = MISSING


@dataclass
class Memory:
    """The fields of `facts.memory.MemoryPolicy`."""

    moments: str = "auto"
    halve_batches: bool = True
    checkpoint_blocks: bool = False
    layers_at_once: int | None = None


@dataclass
class Timing:
    """The fields of `facts.hardware.TimingPolicy`."""

    num_warmups: int = 1
    num_turns: int = 7
    min_seconds: float = 0.2


@dataclass
class Hardware:
    device: str = MISSING
    precision: str = "float32"
    matmul_precision: str = "highest"
    num_threads: int | None = None
    memory: Memory = field(default_factory=Memory)
    batch_size: int = 64
    compile: bool = False
    timing: Timing = field(default_factory=Timing)


@dataclass
class Tracking:
    mode: str = MISSING
    project: str = "facts"


@dataclass
class Stages:
    """The fields of `facts.finetuning.Stages`, each with one target a profile."""

    task: ByProfile = MISSING
    retraining: ByProfile = MISSING
    training: ByProfile = MISSING


@dataclass
class Experiment:
    """A table or a figure: rows and columns of overrides, the figures of the paper, and how to show them.

    With `metrics` it is a table; with `figure`, the name of a drawing in `experiments/figures.py`, a figure, or both.
    `axis` says what an ablation's rows vary. `properties` are attributes of the estimators, with their titles, that the
    table shows beside their rows.
    `not_applicable` says, by row and column, why a cell is left out.
    """

    name: str = MISSING
    title: str = ""
    task: str = ""
    figure: str = ""
    axis: str = ""
    metrics: dict[str, str] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    ranked_by: str = ""
    overrides: list[str] = field(default_factory=list)
    columns: dict[str, list[str]] = field(default_factory=dict)
    rows: dict[str, list[str]] = field(default_factory=dict)
    unranked: list[str] = field(default_factory=list)
    not_applicable: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    paper: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)


@dataclass
class Config:
    """A cell; `plan` and `force` are of `reproduce` alone (conf/reproduce.yaml)."""

    model: ByProfile = MISSING
    estimator: dict[str, Any] = MISSING
    search: dict[str, Any] = MISSING
    task: ByProfile = MISSING
    profile: Profile = MISSING
    hardware: Hardware = MISSING
    tracking: Tracking = MISSING
    analysis: ByProfile | None = None
    pruning: ByProfile | None = None
    finetuning: ByProfile | None = None
    stages: Stages | None = None
    experiment: Experiment | None = None
    ratio: float = 0.5
    cost: str = "flops"
    labels: str = "given"
    bounds: dict[str, float] = field(default_factory=dict)
    cache: bool = True
    checkpoints: str = "pretrained"
    seed: int = 0
    results: str = "results"
    plan: bool = False
    force: bool = False


ConfigStore.instance().store(name="schema", node=Config)
