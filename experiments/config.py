"""Schema of a configuration: every key with its type. Defaults are in `conf/`; methods check their own fields."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

PACKAGED = Path(__file__).with_name("conf")  # in a wheel; in a clone it is next to the packages
CONF = str(PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[1] / "conf")


@dataclass
class ByProfile:
    """A choice with one target per profile: the paper's, and its stand-in."""

    name: str = MISSING
    title: str = ""
    paper: dict[str, Any] = MISSING
    mini: dict[str, Any] = MISSING


@dataclass
class Profile:
    name: str = MISSING
    comparable: bool = MISSING


@dataclass
class Hardware:
    """`memory` has the fields of `facts.moments.collect.MemoryPolicy`, `timing` has those of `TimingPolicy`."""

    device: str = MISSING
    precision: str = MISSING
    matmul_precision: str = MISSING
    num_threads: int | None = MISSING
    memory: dict[str, Any] = MISSING
    batch_size: int = MISSING
    compile: bool = MISSING
    timing: dict[str, Any] = MISSING


@dataclass
class Tracking:
    """`group` is the name under which W&B shows the runs, by default a sweep's overrides."""

    mode: str = MISSING
    project: str = "facts"
    group: str | None = None


@dataclass
class Experiment:
    """A table or a figure: rows and columns of overrides, and how to show them. Or a collection of `experiments`.

    With `metrics` it has a table; with `figure`, the name of a function in `experiments/output/figures.py`, a figure.
    The overrides in `mini` apply only to that profile, after the columns'. An ablation has a row for each of the
    `axis_values` of its `axis`, a field or a list of fields; `option` is its file if the command line names it.
    `seeds` is the number of draws of the calibration sample, the search sample and sampled labels behind each value.
    `properties` are attributes of the estimators, with their titles, that the table shows. With `by_device`, rows of
    other devices follow. `not_applicable` holds, by row and column, the reasons why cells are left out.
    """

    name: str = MISSING
    title: str = ""
    task: str = ""
    figure: str = ""
    option: str = ""
    axis: Any = None
    axis_values: Any = None
    axis_title: str = ""
    metrics: dict[str, str] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    experiments: list[str] = field(default_factory=list)
    ranked_by: str = ""
    by_device: bool = False
    overrides: list[str] = field(default_factory=list)
    mini: list[str] = field(default_factory=list)
    columns: dict[str, list[str]] = field(default_factory=dict)
    rows: dict[str, list[str]] = field(default_factory=dict)
    unranked: list[str] = field(default_factory=list)
    not_applicable: dict[str, dict[str, str]] = field(default_factory=dict)
    seeds: int = 1
    notes: list[str] = field(default_factory=list)


@dataclass
class Config:
    """A cell; `workers` and the keys of conf/reproduce.yaml are for whole tables."""

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
    stages: dict[str, ByProfile] | None = None
    experiment: Experiment | None = None
    parts: str = MISSING
    rounds: list[float] | None = None
    form: str = MISSING
    fit_bias: bool = MISSING
    ratio: float = MISSING
    cost: str = MISSING
    labels: str = MISSING
    excluded_names: list[str] = MISSING
    bounds: dict[str, float | None] = MISSING
    cache: Any = MISSING
    checkpoints: str = MISSING
    imagenet: str = MISSING
    coco: str = MISSING
    ade20k: str = MISSING
    seed: int = MISSING
    results: str = MISSING
    axis: Any = None
    values: Any = None
    seeds: int | None = None
    plan: Any = False
    deep: bool = False
    force: bool = False
    part: int | None = None
    workers: int | None = 1


ConfigStore.instance().store(name="schema", node=Config)
