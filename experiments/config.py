"""Configurations: their schema, how they are composed, the objects that they name, and the extras that those need.

Defaults are in `conf/`; methods check their own fields.
"""

import copy
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

import experiments.resolvers  # noqa: F401, which the files name
from facts.utils.options import faults_of, options_of
from facts.utils.streams import make_output_lasting

T = TypeVar("T")
log = logging.getLogger(__name__)

PACKAGED = Path(__file__).with_name("conf")  # in a wheel; in a clone it is next to the packages
CONF = str(PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[1] / "conf")

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
APART = ("analysis", "estimator", "experiment", "finetuning", "pruning", "search")  # groups that set no other's fields
OF_TABLES = {"experiment", "axis", "values", "seeds", "plan", "force", "part", "workers"}  # keys that no cell has
FULL = "HYDRA_FULL_ERROR"  # 1: errors are shown in full
USER_ERRORS = (ImportError, MemoryError, OSError, ValueError, OmegaConfBaseException, YAMLError)
LAUNCHERS = {"ray": "ray", **dict.fromkeys(("joblib", "submitit_local", "submitit_slurm"), "sweep")}
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
    the command line names it. `seeds` is the number of draws of the calibration sample, the search sample and sampled
    labels behind each value, unless the profile or the command line says otherwise. `properties` are attributes of the
    estimators, with their titles, that the table shows. `not_applicable` holds, by row and column, the reasons why
    cells are left out. A collection with `tasks` has only the experiments of these tasks.
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
    tasks: list[str] = field(default_factory=list)
    ranked_by: str = ""
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


def given_overrides() -> list[Override]:
    """The overrides of the command line."""
    return OverridesParser.create().parse_overrides(HydraConfig.get().overrides.task)


def compose(*overrides: str) -> DictConfig:
    """Compose a cell: the command line's overrides, then these. Raises `ValueError` as `composed` does."""
    given = [override for override in HydraConfig.get().overrides.task if not override.startswith("experiment=")]
    return composed(*given, *overrides)


def command(config_name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make a function of a configuration a Hydra command. What cannot be composed ends it with one line, too."""

    def decorated(function: Callable[[DictConfig], None]) -> Callable[[], None]:
        run = hydra.main(version_base="1.3", config_path=CONF, config_name=config_name)(function)

        @wraps(function)
        def main() -> None:
            make_output_lasting()
            given = os.environ.get(FULL)
            os.environ[FULL] = "1"  # else Hydra prints its errors itself, in many lines, and exits
            try:
                with _as_value_error():
                    run()
            except SystemExit as stop:
                if given == "1" and (cause := stop.__cause__):
                    raise cause from cause.__cause__
                raise
            except USER_ERRORS as error:
                if given == "1":
                    raise
                raise SystemExit(told(error)) from error
            finally:
                del os.environ[FULL]
                os.environ |= {} if given is None else {FULL: given}

        return main

    return decorated


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Turn Hydra's errors, of many lines, into a `ValueError` of one."""
    try:
        yield
    except MissingConfigException as error:
        name, options = str(error.missing_cfg_file), list(error.options or ())
        if extra := LAUNCHERS.get(name.removeprefix("hydra/launcher/")):
            raise ValueError(f"{name} is not installed: {how_to_install(extra)}") from error
        raise ValueError(f"{name} is not one of {_among(options, name.rpartition('/')[2])}") from error
    except OverrideParseException as error:
        reason = str(error).partition("\n")[0]
        advice = "quote a value with special characters twice, as in \"results='~/mine'\""
        raise ValueError(f"{error.override} cannot be read ({reason}): {advice}") from error
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
            known = _among([*map(str, cause.parent_node)], str(cause.key))
            where = "its group has" if "." in str(cause.full_key) else "there are"
            raise ValueError(f"there is no field {cause.full_key}; {where} {known}") from error
        reason = str(cause).partition("\n")[0] if cause else ""
        raise ValueError(": ".join(filter(None, (in_a_line(error), reason)))) from error


def _among(known: list[str], name: str) -> str:
    known = [each for each in known if not each.startswith("_")]  # what only files extend
    near = get_close_matches(name, known, 1)
    return ", ".join(known) + (f" (did you mean {near[0]}?)" if near else "")


@_as_value_error()
def composed(*overrides: str) -> DictConfig:
    """Compose a cell as Hydra does. Raises `ValueError` for a choice or a field that does not exist.

    Composing takes a tenth of a second, so each set of choices is composed once; groups in `APART` are composed on
    their own and put in, and values are set last.
    """
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create().parse_overrides([*overrides])
    values = [each for each in parsed if each.type == OverrideType.CHANGE and not _is_choice(loader, each)]
    choices = [(str(each.input_line), each.get_key_element()) for each in parsed if each not in values]
    added_to = {each.key_or_group.partition(".")[0] for each in parsed if each.type != OverrideType.CHANGE}
    apart = {*APART} - added_to
    config = copy.deepcopy(_chosen(loader, *(line for line, group in choices if group not in apart)))
    for line, group in choices:
        if group in apart:
            config[group] = _chosen(loader, line)[group]
    for override in values:
        try:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException(f"Error merging override {override.input_line}") from error
    return config


def _is_choice(loader: ConfigLoader, override: Override) -> bool:
    is_group = _is_group(loader, override.key_or_group)
    return override.is_sweep_override() or (is_group and not isinstance(override.value(), dict))


@lru_cache(maxsize=256)
def _is_group(loader: ConfigLoader, key: str) -> bool:
    return bool(loader.get_group_options(key))


def is_ours(name: str) -> bool:
    """Whether an experiment's file is in `conf`, not in a folder of a user's own."""
    return Path(CONF, "experiment", f"{name}.yaml").exists()


def read_experiment(name: str) -> Experiment:
    """Read an experiment's file and those that it extends, which takes no time beside composing a cell."""
    return cast(Experiment, OmegaConf.merge(Experiment, read_file(f"experiment/{name}")))


def read_file(path: str) -> DictConfig:
    """Read `group/name`, from `conf` or a folder of your own, and the files of its group that it extends."""
    return _read(GlobalHydra.instance().config_loader(), path)


@lru_cache(maxsize=256)
def _read(loader: Any, path: str) -> DictConfig:
    file = loader.repository.load_config(path)
    if file is None:
        raise ValueError(f"there is no {path}.yaml")
    group = path.partition("/")[0]
    extended = [_read(loader, f"{group}/{each.path}") for each in file.defaults_list if each.path != "_self_"]
    return cast(DictConfig, OmegaConf.merge(*extended, file.config))


@lru_cache(maxsize=256)
def _chosen(loader: ConfigLoader, *choices: str) -> DictConfig:
    return hydra.compose("run", [*choices])


def instantiate(node: DictConfig | ListConfig, key: str = "", kind: type = object) -> Any:
    """Build a node's `_target_`. Raises a one-line `ValueError` for fields out of range and targets of another kind."""
    check_is_group(node)
    place = key or node._get_full_key(None)
    try:
        made = hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if cause and isinstance(cause.__cause__, ValidationError):
            raise ValueError(
                faults_of(cause.__cause__, place, known=options_of(hydra.utils.get_class(node._target_)))
            ) from None
        if cause is None or str(error).startswith("Error locating target"):
            reason = " ".join(str(cause or error).split("\n")[: 2 if cause else 1])
            module, _, name = str(OmegaConf.select(node, "_target_")).rpartition(".")
            if module and _is_there(module):
                reason = f"{module} has no {name}"
            raise ValueError(f"{place}._target_: {reason}") from None
        if isinstance(cause, ImportError | OSError | ValueError):
            raise cause from None
        raise ValueError(f"{place}: {cause}") from cause
    if not isinstance(made, kind):
        raise ValueError(f"{place}._target_: {type(made).__name__} is no {kind.__name__}: choose a subclass of it")
    return made


def check_is_group(node: Any) -> None:
    """Raise `ValueError` for a single value where a group of fields is expected."""
    if not OmegaConf.is_config(node):
        raise ValueError(
            f"got {node!r} where a group of fields is expected: set its fields, as in hardware.timing.num_turns=5"
        )


def checked(kind: type[T], node: DictConfig) -> T:
    """Build an object from the fields of a node without a target. Raises `ValueError` as `instantiate` does."""
    check_is_group(node)
    try:
        return kind(**{str(name): value for name, value in node.items()})
    except ValueError as error:
        if isinstance(error.__cause__, ValidationError):
            raise ValueError(faults_of(error.__cause__, node._get_full_key(None), known=options_of(kind))) from None
        raise


def say_what_takes_seconds() -> None:
    if "torch" not in sys.modules:
        log.info("loading PyTorch, which takes seconds")


def told(error: BaseException) -> str:
    """What a command says of an error at its end."""
    return f"error: {in_a_line(error)} ({FULL}=1 shows where)"


def in_a_line(error: BaseException) -> str:
    """Join the lines of an error: OmegaConf and YAML name the place on a separate one."""
    return "; ".join(map(str.strip, str(error).splitlines()))


def plain(value: Any) -> Any:
    """Resolve a configuration's value into plain containers."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def as_json(node: DictConfig) -> str:
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
