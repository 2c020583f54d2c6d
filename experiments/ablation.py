"""Ablations: experiments whose rows are the values of an axis: one field, or several that vary together."""

import copy
import json
import re
from difflib import get_close_matches
from typing import Any
from zlib import crc32

import pandas as pd
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from experiments.cell import PROFILES, Cell
from experiments.composition import compose, given_overrides
from experiments.config import Experiment
from experiments.instantiation import plain

# Keys that concern a whole run: they cannot be an axis and do not enter an ablation's name.
OF_RUN = {"axis", "deep", "force", "part", "plan", "profile", "results", "tracking", "values", "workers"}
OF_RUN |= {"ade20k", "checkpoints", "coco", "imagenet"}  # folders
MOST_CHARACTERS = 100  # in a name


def with_rows(experiment: Experiment) -> Experiment:
    """Give an experiment with an axis one row per value; return others unchanged."""
    if not experiment.axis:
        return experiment
    experiment = copy.deepcopy(experiment)
    experiment.rows = rows_of(plain(experiment.axis), plain(experiment.axis_values))
    return experiment


def rows_of(axis: str | list[str], values: Any) -> dict[str, list[str]]:
    """Make each value's overrides, by label; for a list of fields, a value is a list with one setting per field."""
    if not isinstance(values, list | dict) or not values:
        raise ValueError(f"values must be a list such as values=[0,0.3,0.7], or a mapping of labels, got {values!r}")
    fields, rows = axis if isinstance(axis, list) else [axis], {}
    for label, value in values.items() if isinstance(values, dict) else ((label_of(value), value) for value in values):
        settings = value if isinstance(axis, list) else [value]
        if not isinstance(settings, list) or len(settings) != len(fields):
            names = ", ".join(map(str, fields))
            raise ValueError(f"each value must be a list of {len(fields)} settings ({names}), got {value!r}")
        rows[str(label)] = [f"{field}={as_override(setting)}" for field, setting in zip(fields, settings, strict=True)]
    return rows


def label_of(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(label_of, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def as_override(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value, ensure_ascii=False)


def ablation_of(config: DictConfig) -> Experiment:
    """Complete the experiment `ablation` from the command line; a model given there becomes the only column."""
    experiment = with_rows(config.experiment)
    axis = plain(experiment.axis)
    fields = [str(field) for field in (axis if isinstance(axis, list) else [axis])]
    given = [override for override in given_overrides() if override.key_or_group.partition(".")[0] not in OF_RUN]
    given = [override for override in given if override.key_or_group not in ("experiment", "experiment.name")]
    keys = {override.key_or_group for override in given}
    experiment.columns = {
        title: [override for override in overrides if override.partition("=")[0] not in keys]
        for title, overrides in experiment.columns.items()
    }
    if "model" in keys:
        experiment.columns = {config.model.title: []}
    start = f"experiment={experiment.option}", f"task={experiment.task}"
    columns = {title: compose(*start, *overrides) for title, overrides in experiment.columns.items()}
    for field in fields:
        check_field(field, next(iter(columns.values())))
    for overrides in experiment.rows.values():
        check_values([*start, *next(iter(experiment.columns.values())), *overrides])
    choices = [line for override in given if "/" not in (line := str(override.input_line))]  # no paths
    if experiment.name == experiment.option:
        values = [override.partition("=")[2] for overrides in experiment.rows.values() for override in overrides]
        experiment.name = name_of([*(field.replace(".", "_") for field in fields), *values, *choices])
    elif experiment.name in GlobalHydra.instance().config_loader().get_group_options("experiment"):
        raise ValueError(f"experiment.name={experiment.name} is another table, which this one would overwrite")
    experiment.overrides = [*experiment.overrides, f"experiment.name={experiment.name}"]
    experiment.axis_title = experiment.axis_title or ", ".join(fields)
    experiment.title = experiment.title or f"Ablation of {', '.join(fields)}"
    defaults = ", ".join(f"{field}={default_of(field, columns)}" for field in fields)
    made = [f"Made with {' '.join(choices)}."] if choices else []
    experiment.notes = [*experiment.notes, f"Default: {defaults}.", *made]
    return experiment


def check_field(field: str, config: DictConfig) -> None:
    """Raise `ValueError`, with the nearest names, unless rows can set this field or choose from this group."""
    names = [*HydraConfig.get().runtime.choices, *pd.json_normalize(plain(config)).columns]
    apart = {*OF_RUN, "experiment", "hydra", *set(PROFILES) - {config.profile.name}}
    known = [name for name in names if not apart & set(re.split("[./]", name)) and name != "model"]
    if field not in known:
        nearest = ", ".join(get_close_matches(field, known, cutoff=0.5)) or "none is similar"
        raise ValueError(f"rows cannot vary axis={field}; the nearest they can vary: {nearest}; --cfg job prints all")


def check_values(overrides: list[str]) -> None:
    """Raise `ValueError` for a value that its field rejects."""
    try:
        Cell.of(compose("hardware.device=cpu", *overrides))  # this check does not need the GPU
    except HydraException as error:
        raise ValueError(f"{error}: {error.__cause__}".partition("\n")[0]) from error


def name_of(parts: list[str]) -> str:
    """Make a file name from an axis, its values, and other choices; a long name is cut and ends with a hash."""
    line = "_".join(["ablation", *parts])
    name = re.sub(r"[^\w-]+", "-", line)
    return name if len(name) <= MOST_CHARACTERS else f"{name[:MOST_CHARACTERS]}_{crc32(line.encode()):08x}"


def default_of(field: str, columns: dict[str, DictConfig]) -> str:
    """Find a field's value without the ablation; list it by column if columns differ."""
    choices = HydraConfig.get().runtime.choices
    values = {title: choices.get(field, plain(OmegaConf.select(config, field))) for title, config in columns.items()}
    if len({*map(label_of, values.values())}) == 1:
        return label_of(values.popitem()[1])
    return " or ".join(f"{label_of(value)} ({title})" for title, value in values.items())
