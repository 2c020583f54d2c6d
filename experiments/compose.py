"""Configurations as Hydra composes them, from `conf/` and folders of your own; and the commands that read them."""

import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache, wraps
from itertools import product
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ConfigDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

import experiments.resolvers  # noqa: F401, which the files name
from experiments.config import USER_ERRORS, Config, Experiment, how_to_install, in_a_line
from facts.utils.options import first_line
from facts.utils.streams import make_output_lasting

log = logging.getLogger(__name__)

PACKAGED = Path(__file__).with_name("conf")  # in a wheel; in a clone it is next to the packages
CONF = str(PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[1] / "conf")
# Groups that set no other's fields, whose own no other sets.
SELF_CONTAINED = {"analysis", "estimator", "experiment", "finetuning", "model", "pruning", "search", "task"}
SCHEMA = pickle.dumps(OmegaConf.structured(Config))
FULL = "HYDRA_FULL_ERROR"  # 1: errors are shown in full
LAUNCHERS = {"ray": "ray", **dict.fromkeys(("joblib", "submitit_local", "submitit_slurm"), "sweep")}


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
                raise SystemExit(format_error(error)) from error
            finally:
                del os.environ[FULL]
                os.environ |= {} if given is None else {FULL: given}

        return main

    return decorated


def announce_loading() -> None:
    if "torch" not in sys.modules:
        log.info("loading PyTorch, which takes seconds")


def format_error(error: BaseException) -> str:
    """Format an error in one line, with which a command ends."""
    return f"error: {in_a_line(error)} ({FULL}=1 shows where)"


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
        advice = "quote a value with special characters twice, as in \"results='~/mine'\""
        raise ValueError(f"{error.override} cannot be read ({first_line(error)}): {advice}") from error
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


def given_overrides() -> list[Override]:
    """The overrides of the command line."""
    return OverridesParser.create().parse_overrides(HydraConfig.get().overrides.task)


def jobs_of(overrides: list[str]) -> list[tuple[str, ...]]:
    """List the overrides of each job of a sweep. Raises `ValueError` if there are none."""
    choices = (
        [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [str(each.input_line)]
        for each in OverridesParser.create(_loader()).parse_overrides(overrides)
    )
    if jobs := list(product(*choices)):
        return jobs
    raise ValueError("the sweep has no runs: a glob matches nothing, or a range is empty")


def given_to_cells(experiment: Experiment) -> list[str]:
    """The overrides that all cells of a table begin with: those of the command line, its own file, and its task."""
    given = [override for override in HydraConfig.get().overrides.task if not override.startswith("experiment=")]
    return [*given, f"experiment={experiment.option or experiment.name}", f"task={experiment.task}"]


@_as_value_error()
def composed(*overrides: str) -> DictConfig:
    """Compose a cell as Hydra does. Raises `ValueError` for a choice or a field that does not exist.

    Each set of choices is composed once, and values are set last.
    """
    loader, parsed = _loader(), [*map(_parsed, overrides)]
    values = [each for each in parsed if each.type == OverrideType.CHANGE and not _is_choice(loader, each)]
    config = pickle.loads(_chosen(loader, *(str(each.input_line) for each in parsed if each not in values)))
    for override in values:
        try:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException(f"Error merging override {override.input_line}") from error
    return config


@lru_cache(maxsize=1024)
def _parsed(override: str) -> Override:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


def _is_choice(loader: ConfigLoader, override: Override) -> bool:
    is_group = _is_group(loader, override.key_or_group)
    return override.is_sweep_override() or (is_group and not isinstance(override.value(), dict))


@lru_cache(maxsize=256)
def _is_group(loader: ConfigLoader, key: str) -> bool:
    return bool(loader.get_group_options(key))


@lru_cache(maxsize=1024)
def _chosen(loader: ConfigLoader, *choices: str) -> bytes:
    """Compose choices. Hydra takes a fifth of a second, so those of `SELF_CONTAINED` groups are read on their own.

    Returns a pickle: to load one is six times as fast as a deep copy.
    """
    parsed = [*map(_parsed, choices)]
    others = {each.key_or_group.partition(".")[0] for each in parsed if each.type != OverrideType.CHANGE}
    if any(each.key_or_group == "stages" for each in parsed):
        others.add("model")  # which these name
    read, rest = dict[str, str](), []
    for each in parsed:
        group, name = each.key_or_group, each.value()
        read.pop(group, None)  # the last one counts
        if group in SELF_CONTAINED - others and isinstance(name, str) and _option(loader, group, name):
            read[group] = name
        else:
            rest.append(str(each.input_line))
    config = pickle.loads(_composed_by_hydra(loader, *rest))
    with flag_override(config, "no_deepcopy_set_nodes", True):
        for group, name in read.items():
            config[group] = pickle.loads(_option(loader, group, name))
    return pickle.dumps(config)


@lru_cache(maxsize=1024)
def _composed_by_hydra(loader: ConfigLoader, *overrides: str) -> bytes:
    return pickle.dumps(hydra.compose("run", [*overrides]))


@lru_cache(maxsize=256)
def _option(loader: ConfigLoader, group: str, name: str) -> bytes:
    """Merge a group's choice into the schema, as a pickle; empty if more than files of its own group make it."""
    files, schema = _files(loader, group, name), pickle.loads(SCHEMA)
    try:
        for file in files:
            schema.merge_with({group: file})
    except OmegaConfBaseException:
        return b""  # Hydra says where it is wrong
    return pickle.dumps(schema[group]) if files else b""


@lru_cache(maxsize=256)
def _files(loader: Any, group: str, name: str) -> list[DictConfig]:
    """Read a choice's file, behind those of its group that it extends; none if it is missing or sets other groups."""
    file = loader.repository.load_config(f"{group}/{name}")
    if file is None or file.header["package"]:
        return []
    *extended, last = file.defaults_list or [ConfigDefault(path="_self_")]
    if not all(isinstance(each, ConfigDefault) and not each.package for each in extended) or not last.is_self():
        return []
    found = [_files(loader, group, each.path) for each in extended]
    if not all(found):
        return []
    return [*(each for files in found for each in files), file.config]


def read_file(group: str, name: str) -> DictConfig:
    """Read a choice from `conf` or a folder of your own, which takes no time beside composing. Raises `ValueError`."""
    if files := _files(_loader(), group, name):
        return cast(DictConfig, OmegaConf.merge(*files))
    raise ValueError(f"there is no {group}/{name}.yaml that extends only files of its group")


def read_experiment(name: str) -> Experiment:
    return cast(Experiment, OmegaConf.merge(Experiment, read_file("experiment", name)))


def options_of_group(group: str) -> list[str]:
    """Names of a group's files, a user's own too."""
    return _loader().get_group_options(group)


def is_ours(name: str) -> bool:
    """Whether an experiment's file is in `conf`, not in a folder of a user's own."""
    return Path(CONF, "experiment", f"{name}.yaml").exists()


def _loader() -> ConfigLoader:
    return GlobalHydra.instance().config_loader()
