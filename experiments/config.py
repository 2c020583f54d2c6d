"""Configurations: their schema, the objects that they name, and the extras that those need.

Defaults are in `conf/`; methods check their own fields.
"""

import importlib.util
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from facts.utils.options import faults_of, options_of

T = TypeVar("T")

MODULES = {
    "analysis": ("hyppo",),
    "detection": ("mmcv._ext", "mmdet", "mmseg"),  # a plain install lacks mmcv's operators, the first of these
    "llm": ("accelerate", "datasets", "lm_eval", "tokenizers", "transformers"),
    "pruning": ("torch_pruning",),
}
TASKS = {"mmdet": "coco", "mmseg": "ade20k"}  # by the toolbox of a network
EXTRAS = {  # by the name of an analysis, a pruning method or a task
    "token_coupling": "analysis",
    "isomorphic": "pruning",
    **dict.fromkeys(("coco", "ade20k"), "detection"),
    "language": "llm",
}
OF_TABLES = {"experiment", "axis", "values", "seeds", "plan", "force", "part", "workers"}  # keys that no cell has
USER_ERRORS = (ImportError, MemoryError, OSError, ValueError, OmegaConfBaseException, YAMLError)
PROFILES = ("mini", "photos", "paper")
COMMANDS = {"detection": "make install-detection", "llm": "make install-llm"}


@dataclass
class ByProfile:
    """A choice with one target per profile: the paper's, its stand-in, and that of `photos`, by default the paper's."""

    name: str = MISSING
    title: str = ""
    paper: dict[str, Any] = MISSING
    mini: dict[str, Any] = MISSING
    photos: Any = "${of_paper:}"


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
    timing: dict[str, Any] = MISSING


@dataclass
class Tracking:
    """`group` is the name under which W&B shows the runs, by default the experiment's; `entity` a user or a team."""

    mode: str = MISSING
    project: str = "facts"
    entity: str | None = None
    group: str | None = None


@dataclass
class Experiment:
    """A table or a figure: rows and columns of overrides, and how to show them. Or a collection of `experiments`.

    With `metrics` it has a table; with `figure`, one of `DRAWINGS` in `experiments/output/results.py`, a figure. The
    overrides in `mini` apply only to that profile, after the columns'. `photos` holds the fields that differ in that
    profile: an experiment without it is not for that profile, one with all its columns there is only for it. An
    ablation has a row for each of the `axis_values` of its `axis`, a field or a list of fields; `option` is its file if
    the command line names it, and `default` the row from which its figure's differences are. `drawn` are the rows of a
    figure of steps, by default the best ones; its message is about the first. `seeds` is the
    number of draws of the calibration sample, the search sample and sampled labels behind each value, unless the
    profile or the command line says otherwise. `properties` are attributes of the estimators, with their titles, that
    the table shows. `shown` are the metrics of tables to be read, by default the ranked one, or all if there is but one
    row or column. `row_titles` and `column_titles` are names in the profile. `unranked` rows are no methods that may be
    the best. `not_applicable` holds, by row and column, the reasons why cells are left out.
    A collection with `tasks` has only the experiments of these tasks.
    """

    name: str = MISSING
    title: str = ""
    task: str = ""
    figure: str = ""
    option: str = ""
    axis: Any = None
    axis_values: Any = None
    axis_title: str = ""
    default: str = ""
    drawn: list[str] = field(default_factory=list)
    metrics: dict[str, str] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    experiments: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    ranked_by: str = ""
    shown: list[str] = field(default_factory=list)
    row_titles: dict[str, str] = field(default_factory=dict)
    column_titles: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    mini: list[str] = field(default_factory=list)
    photos: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)
    rows: dict[str, list[str]] = field(default_factory=dict)
    unranked: list[str] = field(default_factory=list)
    not_applicable: dict[str, dict[str, str]] = field(default_factory=dict)
    seeds: int = 1
    notes: list[str] = field(default_factory=list)


@dataclass
class Config:
    """A cell; `workers`, `seeds` and the keys of conf/reproduce.yaml are for whole tables."""

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
    form: str = MISSING
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
    photos: str = MISSING
    seed: int = MISSING
    results: str = MISSING
    axis: Any = None
    values: Any = None
    seeds: int | None = None
    plan: bool = False
    force: bool = False
    part: int | None = None
    workers: int | None = 1


ConfigStore.instance().store(name="schema", node=Config)


def instantiate(node: DictConfig | ListConfig, kind: type = object) -> Any:
    """Build a node's `_target_`, once for equal nodes. Raises `ValueError` as `build` does."""
    check_is_group(node)
    return _built(as_json(node), node._get_full_key(None), kind)


def build(text: str, place: str, kind: type = object) -> Any:
    """Build the `_target_` of a node as JSON, which is at `place` of a configuration.

    Raises a one-line `ValueError` for fields out of range and targets of another kind.
    """
    node = json.loads(text)
    try:
        made = hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if cause and isinstance(cause.__cause__, ValidationError):
            known = options_of(hydra.utils.get_class(node["_target_"]))
            raise ValueError(faults_of(cause.__cause__, place, known=known)) from None
        if cause is None or str(error).startswith("Error locating target"):
            reason = " ".join(str(cause or error).split("\n")[: 2 if cause else 1])
            module, _, name = str(node.get("_target_")).rpartition(".")
            if module and _is_there(module):
                reason = f"{module} has no {name}"
            raise ValueError(f"{place}._target_: {reason}") from None
        if isinstance(cause, ImportError | OSError | ValueError):
            raise cause from None
        raise ValueError(f"{place}: {cause}") from cause
    if not isinstance(made, kind):
        raise ValueError(f"{place}._target_: {type(made).__name__} is no {kind.__name__}: choose a subclass of it")
    return made


_built = lru_cache(maxsize=256)(build)


def of_profile(config: DictConfig, group: str) -> Any:
    """Return the choice of a group for the profile, or None. Raises `ValueError` if it has no settings for it."""
    node, profile = config[group], config.profile.name
    if not node:
        return None
    has = [name for name in PROFILES if not OmegaConf.is_missing(node, name) and node[name] is not None]
    if profile not in has:
        raise ValueError(f"{group}={node.name} has no settings for profile={profile}, only for {' and '.join(has)}")
    return node[profile]


def check_is_group(node: Any) -> None:
    """Raise `ValueError` for a single value where a group of fields is expected."""
    if not OmegaConf.is_config(node):
        raise ValueError(
            f"got {node!r} where a group of fields is expected: set its fields, as in hardware.timing.num_turns=5"
        )


def from_fields(kind: type[T], node: DictConfig) -> T:
    """Build an object from the fields of a node without a target. Raises `ValueError` as `instantiate` does."""
    check_is_group(node)
    try:
        return kind(**{str(name): value for name, value in node.items()})
    except ValueError as error:
        if isinstance(error.__cause__, ValidationError):
            raise ValueError(faults_of(error.__cause__, node._get_full_key(None), known=options_of(kind))) from None
        raise


def in_a_line(error: BaseException) -> str:
    """Join the lines of an error: OmegaConf and YAML name the place on a separate one."""
    return "; ".join(map(str.strip, str(error).splitlines()))


def plain(value: Any) -> Any:
    """Resolve a configuration's value into plain containers."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def as_json(node: DictConfig | ListConfig) -> str:
    return json.dumps(plain(node))


def missing_packages(extra: str | None) -> list[str]:
    """Packages of an extra that cannot be imported here."""
    return [module for module in MODULES.get(extra or "", ()) if not _is_there(module)]


def how_to_install(extra: str) -> str:
    return COMMANDS.get(extra, f"pip install -e '.[{extra}]'")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False
