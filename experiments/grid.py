"""Experiments that are chosen, with the rows and columns of their tables.

The rows of an ablation are the values of an axis: one field, or several that vary together.
"""

import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any
from zlib import crc32

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from pydantic import TypeAdapter, ValidationError

from experiments.compose import (
    composed,
    given_overrides,
    given_to_cells,
    is_ours,
    options_of_group,
    read_experiment,
    read_file,
)
from experiments.config import EXTRAS, OF_TABLES, Experiment, missing_packages, plain
from facts.utils.options import faults_of, first_line

log = logging.getLogger(__name__)

SMALL = "small "  # before the name of a network in the profile `mini`
MAIN = "main"  # the collection that runs by default
EXPERIMENT = TypeAdapter(Experiment)
# Keys that concern a whole run: they cannot be an axis and do not enter an ablation's name.
OF_RUN = {"axis", "force", "part", "plan", "profile", "results", "tracking", "values", "workers"}
OF_RUN |= {"ade20k", "checkpoints", "coco", "imagenet", "photos"}  # folders
MOST_CHARACTERS = 100  # in a name
MOST_SEEDS = 1000


def chosen_experiments(config: DictConfig) -> Iterator[Experiment]:
    """Yield the experiments of `experiment=`, each with `seeds` draws if the command line or the profile says so."""
    for experiment in named_experiments(config):
        if experiment.experiments:
            reason = "but a list or a collection may name only tables and figures: name its own"
            raise ValueError(f"{experiment.name} is a collection, {reason}")
        if config.seeds is not None:
            experiment.seeds = config.seeds
        if not 1 <= experiment.seeds <= MOST_SEEDS:
            raise ValueError(f"seeds must be from 1 to {MOST_SEEDS:,}, got {experiment.seeds}")
        of_columns = [{line.partition("=")[0] for line in lines} for lines in experiment.columns.values()]
        for key in {override.key_or_group for override in given_overrides()}.intersection(*of_columns):
            log.warning("%s= has no effect on %s, all columns of which set it", key, experiment.name)
        yield experiment


def named_experiments(config: DictConfig) -> Iterator[Experiment]:
    """Yield the experiments of `experiment=`: one, a list, or those of a collection whose packages are installed."""
    given = [override.value() for override in given_overrides() if override.key_or_group == "experiment"] or [MAIN]
    names = given[-1] if isinstance(given[-1], list) else given[-1:]  # Hydra would merge the files of a list into one
    if not names or None in names:
        raise ValueError("experiment= names nothing: name a table, or leave it out for the main job")
    ablates = bool(config.experiment.option)
    if {bool(config.axis), config["values"] is not None} != {ablates} or (ablates and len(names) > 1):
        raise ValueError(
            "axis and values belong to the experiment ablation, which needs both and runs on its own: "
            "experiment=ablation axis=estimator.shrinkage_row values=[0,0.3,0.7]"
        )
    if ablates:
        experiment = ablation_of(config)
        yield verified(experiment, experiment.name)
    elif len(names) > 1:
        yield from (verified(read_experiment(name), name) for name in map(str, names))
    elif config.experiment.name == "all":
        yield from possible(every_experiment())
    elif (experiment := verified(config.experiment, str(names[0]))).experiments:
        members = ((read_experiment(name), name) for name in experiment.experiments)
        own = (verified(each, name) for each, name in members if is_for_profile(each))
        yield from possible(
            each for each in own if each.experiments or not experiment.tasks or each.task in experiment.tasks
        )
    else:
        yield experiment


def warn_of_misspelt_metrics(experiments: Iterable[Experiment]) -> None:
    """Name metrics that no table of ours has, but one that is much like them, before any work."""
    files = (read_file("experiment", name) for name in options_of_group("experiment") if is_ours(name))
    known = {metric for file in files for each in (file, file.get("photos", {})) for metric in each.get("metrics", {})}
    for experiment in experiments:
        for metric in experiment.metrics.keys() - known:
            for near in get_close_matches(metric, known, 1):
                log.warning("%s: no table of ours has the metric %s: is %s meant?", experiment.name, metric, near)


def every_experiment() -> list[Experiment]:
    """Every experiment in `conf/experiment`: the main job's in its order, then the others by name."""
    own = {}
    for name in options_of_group("experiment"):
        if name not in ("ablation", "all") and not name.startswith("_"):
            try:
                if is_for_profile(experiment := read_experiment(name)):
                    own[name] = verified(experiment, name)
            except Exception as error:  # one broken file must not keep the others out of the report
                log.warning("%s is left out: %s", name, first_line(error))
    names = dict.fromkeys([*own[MAIN].experiments, *own])
    return [own[name] for name in names if name in own and not own[name].experiments]


def verified(experiment: Experiment, name: str) -> Experiment:
    """Complete an experiment. Raises `ValueError` for one that would produce nothing or overwrite another's table."""
    place = f"experiment/{name}.yaml"
    if experiment.name != name:
        raise ValueError(f"{place}: results go under the name, which must be the file's: {name}, not {experiment.name}")
    try:
        EXPERIMENT.validate_python(plain(experiment))  # OmegaConf does not check what lists hold
    except ValidationError as error:
        raise ValueError(faults_of(error, place)) from None
    experiment = experiment if experiment.option else completed(experiment)
    if experiment.experiments:
        return experiment
    shown = {"rows": experiment.rows, "columns": experiment.columns, "metrics": experiment.metrics or experiment.figure}
    if lacking := [field for field, value in shown.items() if not value]:
        raise ValueError(f"{place} has no {' and no '.join(lacking)}, and would produce nothing")
    if experiment.metrics and experiment.ranked_by not in experiment.metrics:
        raise ValueError(f"{place}: ranked_by must be one of {', '.join(experiment.metrics)}")
    if experiment.default and experiment.default not in experiment.rows:
        raise ValueError(f"{place}: default must be one of {', '.join(experiment.rows)}, or empty")
    if unknown := {*experiment.drawn} - {*experiment.rows}:
        raise ValueError(f"{place}: drawn has {', '.join(sorted(unknown))}, but rows are {', '.join(experiment.rows)}")
    return experiment


def possible(experiments: Iterable[Experiment]) -> Iterator[Experiment]:
    """Yield the experiments whose packages are installed; log the missing packages of the others."""
    for experiment in experiments:
        if packages := missing_packages(EXTRAS.get(experiment.task)):
            missing = ", ".join(packages)
            log.warning("%s is left out, since %s are missing: make reproduce-all", experiment.name, missing)
        else:
            yield experiment


def is_for_profile(experiment: Experiment) -> bool:
    """Check for fields of the profile `photos`, or for columns outside them; a collection is for every profile."""
    own = experiment.photos if chosen_profile() == "photos" else experiment.columns or not experiment.photos
    return bool(experiment.experiments or own)


def completed(experiment: Experiment) -> Experiment:
    """Copy an experiment with its profile's fields, and a row for each value of its axis if it has one.

    Raises `ValueError` if it is not for the profile.
    """
    if not is_for_profile(experiment):
        which = "for" if chosen_profile() == "photos" else "except for"
        raise ValueError(f"experiment={experiment.name} has no columns {which} profile=photos")
    experiment = copy.deepcopy(experiment)
    for name, value in plain(experiment.photos).items() if chosen_profile() == "photos" else ():
        setattr(experiment, name, value)
    if experiment.axis:
        experiment.rows = rows_of(plain(experiment.axis), plain(experiment.axis_values))
    experiment.row_titles = {row: title_of(row, overrides) for row, overrides in experiment.rows.items()}
    experiment.column_titles = names_of_small(experiment.columns, experiment.overrides)
    for name, title in experiment.column_titles.items():
        network = rf"(?<!{SMALL})(?<!\w){re.escape(name)}(?!\w)"
        experiment.title = title.join(re.split(network, experiment.title))
    return experiment


def title_of(row: str, overrides: list[str]) -> str:
    """Put the values of the profile `mini` in place of the paper's, if a row names them."""
    settings = {field: value for field, _, value in (override.partition("=") for override in overrides)}
    for field, value in settings.items() if chosen_profile() == "mini" else ():
        row = row.replace(value, settings.get(field.replace(".paper.", ".mini."), value))
    return row


def names_of_small(columns: Mapping[str, list[str]], overrides: Iterable[str]) -> dict[str, str]:
    """Name columns and networks of the profile `mini` as small ones, since they are called after large ones."""
    if chosen_profile() != "mini":
        return {}
    own = [column for column, lines in columns.items() if any(line.startswith("model=") for line in lines)]
    names = {name for column in own for name in (column, column.partition(", ")[0])}
    models = [line.removeprefix("model=") for line in overrides if line.startswith("model=")]
    names |= {read_file("model", model)["title"] for model in models}
    return {name: f"{SMALL}{name}" for name in sorted(names)}


def chosen_profile() -> str:
    return HydraConfig.get().runtime.choices["profile"] if HydraConfig.initialized() else ""


def rows_of(axis: str | list[str], values: Any) -> dict[str, list[str]]:
    """Make each value's overrides, by label; for a list of fields, a value is a list with one setting per field."""
    if not isinstance(values, list | dict) or not values:
        raise ValueError(f"values must be a list such as values=[0,0.3,0.7], or a mapping of labels, got {values!r}")
    fields, rows = axis if isinstance(axis, list) else [axis], {}
    if of_run := {str(field).lstrip("+").partition(".")[0] for field in fields} & (OF_RUN | OF_TABLES):
        names = ", ".join(sorted(of_run))
        raise ValueError(f"axis must be a cell's field, such as ratio, but {names} concerns the whole run")
    if len({*fields}) < len(fields):
        raise ValueError(f"axis names a field twice: {', '.join(fields)}")
    for label, value in values.items() if isinstance(values, dict) else ((label_of(value), value) for value in values):
        settings = value if isinstance(axis, list) else [value]
        if not isinstance(settings, list) or len(settings) != len(fields):
            names = ", ".join(map(str, fields))
            raise ValueError(f"each value must be a list of {len(fields)} settings ({names}), got {value!r}")
        if str(label) in rows:
            raise ValueError(f"values holds {label} twice")
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
    experiment = completed(config.experiment)
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
        experiment.column_titles = names_of_small({}, given_to_cells(experiment))
    start = given_to_cells(experiment)
    columns = {title: composed(*start, *overrides) for title, overrides in experiment.columns.items()}
    choices = [line for override in given if "/" not in (line := str(override.input_line))]  # no paths
    if experiment.name == experiment.option:
        values = [override.partition("=")[2] for overrides in experiment.rows.values() for override in overrides]
        experiment.name = name_of([*(field.replace(".", "_") for field in fields), *values, *choices])
    elif experiment.name in options_of_group("experiment") or not re.fullmatch(r"[\w-]+", experiment.name):
        raise ValueError(f"experiment.name={experiment.name}: give it a new name, of letters, digits, _ and -")
    experiment.overrides = [*experiment.overrides, f"experiment.name={experiment.name}"]
    experiment.axis_title = experiment.axis_title or ", ".join(fields)
    titles = experiment.column_titles
    ratios = " and ".join(f"{100 * config.ratio:g} % ({titles.get(title, title)})" for title, config in columns.items())
    at_ratios = "" if "ratio" in fields else f", at {ratios}"
    experiment.title = experiment.title or f"Ablation of {', '.join(fields)}{at_ratios}"
    if choices:
        experiment.notes = [*experiment.notes, f"Made with {' '.join(choices)}."]
    return experiment


def name_of(parts: list[str]) -> str:
    """Make a file name from an axis, its values, and other choices; a long name is cut and ends with a hash."""
    line = "_".join(["ablation", *parts])
    name = re.sub(r"[^\w-]+", "-", line)
    return name if len(name) <= MOST_CHARACTERS else f"{name[:MOST_CHARACTERS]}_{crc32(line.encode()):08x}"
