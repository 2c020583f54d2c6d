"""Ablations: experiments whose rows are the values of an axis, one field or several together."""

import copy
import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any
from zlib import crc32

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from experiments.cell import PROFILES, Cell
from experiments.composition import compose, given_overrides
from experiments.config import Experiment

# Keys of a whole run: no axis, and no part of an ablation's name.
OF_RUN = {"axis", "deep", "force", "part", "plan", "profile", "results", "tracking", "values", "workers"}
MOST_CHARACTERS = 100  # in a name


def with_rows(experiment: Experiment) -> Experiment:
    """Give an experiment with an axis a row for each of its values; another stays as it is."""
    if not experiment.axis:
        return experiment
    experiment = copy.deepcopy(experiment)
    experiment.rows = rows_of(plain(experiment.axis), plain(experiment.axis_values))
    return experiment


def plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def rows_of(axis: str | list[str], values: Any) -> dict[str, list[str]]:
    """The overrides of each value by its label. If the axis is a list of fields, each value is a list of as many.

    Raises `ValueError` for anything but a list of values, or a mapping of labels to values.
    """
    if not isinstance(values, list | dict) or not values:
        raise ValueError(f"values must be a list such as values=[0,0.3,0.7], or a mapping of labels, got {values!r}")
    labelled = values if isinstance(values, dict) else {label_of(value): value for value in values}
    return {str(label): overrides_of(axis, value) for label, value in labelled.items()}


def label_of(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(label_of, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def overrides_of(axis: str | list[str], value: Any) -> list[str]:
    """Set the fields of an axis. Raises `ValueError` unless there is a setting for each."""
    if not isinstance(axis, list):
        return [f"{axis}={as_override(value)}"]
    if not isinstance(value, list) or len(value) != len(axis):
        raise ValueError(
            f"each value must be a list of {len(axis)} settings, of {', '.join(map(str, axis))}, got {value!r}"
        )
    return [f"{field}={as_override(setting)}" for field, setting in zip(axis, value, strict=True)]


def as_override(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value, ensure_ascii=False)


def ablation_of(config: DictConfig) -> Experiment:
    """The experiment `ablation` of the command line: its name, rows, columns and notes.

    A model on the command line makes the only column; other overrides hold in all columns. Raises `ValueError` for a
    field that does not exist, and for a value that it refuses.
    """
    experiment = with_rows(config.experiment)
    axis = plain(experiment.axis)
    fields = [str(field) for field in (axis if isinstance(axis, list) else [axis])]
    given = [override for override in given_overrides() if belongs_to_cells(override.key_or_group)]
    experiment.columns = columns_of(config, {override.key_or_group for override in given})
    start = f"experiment={experiment.option}", f"task={experiment.task}"
    columns = {title: compose(*start, *overrides) for title, overrides in experiment.columns.items()}
    for field in fields:
        check_field(field, next(iter(columns.values())))
    for overrides in experiment.rows.values():
        check_values([*start, *next(iter(experiment.columns.values())), *overrides])
    choices = [line for override in given if "/" not in (line := str(override.input_line))]  # no places
    if experiment.name == experiment.option:
        values = [override.partition("=")[2] for overrides in experiment.rows.values() for override in overrides]
        experiment.name = name_of([*(field.replace(".", "_") for field in fields), *values, *choices])
    experiment.overrides = [*experiment.overrides, f"experiment.name={experiment.name}"]
    experiment.axis_title = experiment.axis_title or ", ".join(fields)
    experiment.title = experiment.title or f"Ablation of {', '.join(fields)}"
    experiment.notes = [
        *experiment.notes,
        f"Default: {', '.join(f'{field}={default_of(field, columns)}' for field in fields)}.",
        *([f"Made with {' '.join(choices)}."] if choices else []),
    ]
    return experiment


def belongs_to_cells(key: str) -> bool:
    return key not in ("experiment", "experiment.name") and key.partition(".")[0] not in OF_RUN


def columns_of(config: DictConfig, given: set[str]) -> dict[str, list[str]]:
    """The columns of the experiment, without what the command line sets; with a model there, this one alone."""
    if "model" in given:
        return {config.model.title: []}
    return {
        title: [override for override in overrides if override.partition("=")[0] not in given]
        for title, overrides in config.experiment.columns.items()
    }


def check_field(field: str, config: DictConfig) -> None:
    """Raises `ValueError`, with the nearest names, unless rows can set this field or choose from this group."""
    groups = HydraConfig.get().runtime.choices
    apart = {*OF_RUN, "experiment", "hydra", *set(PROFILES) - {config.profile.name}}
    keys = (*groups, *fields_of(OmegaConf.to_container(config)))
    known = [key for key in keys if not apart & set(re.split("[./]", key)) and key != "model"]
    if field not in known:
        nearest = ", ".join(get_close_matches(field, known, cutoff=0.5)) or "none is like it"
        raise ValueError(f"rows cannot vary axis={field}; the nearest that they can: {nearest}; --cfg job prints all")


def fields_of(node: Any, start: str = "") -> Iterator[str]:
    """Names of all fields of a configuration, from its root."""
    for name, child in node.items():
        if isinstance(child, dict):
            yield from fields_of(child, f"{start}{name}.")
        else:
            yield f"{start}{name}"


def check_values(overrides: list[str]) -> None:
    """Raises `ValueError` for a value that its field refuses."""
    try:
        Cell.of(compose("hardware.device=cpu", *overrides))  # whether there is a GPU is no matter of values
    except HydraException as error:
        raise ValueError(f"{error}: {error.__cause__}".partition("\n")[0]) from error


def name_of(parts: list[str]) -> str:
    """A name for files, of an axis, its values, and what else was chosen; a long one is cut and ends with a hash."""
    line = "_".join(["ablation", *parts])
    name = re.sub(r"[^\w-]+", "-", line)
    return name if len(name) <= MOST_CHARACTERS else f"{name[:MOST_CHARACTERS]}_{crc32(line.encode()):08x}"


def default_of(field: str, columns: dict[str, DictConfig]) -> str:
    """The value of a field without the ablation, by column where columns differ."""
    choices = HydraConfig.get().runtime.choices
    values = {
        title: label_of(choices[field] if field in choices else plain(OmegaConf.select(config, field)))
        for title, config in columns.items()
    }
    if len(set(values.values())) == 1:
        return values.popitem()[1]
    return " or ".join(f"{value} ({title})" for title, value in values.items())
