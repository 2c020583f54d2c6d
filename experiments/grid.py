"""Grids of cells: rows and columns of a table or figure, each cell with its configuration and, later, its record."""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from experiments.ablation import ablation_of, with_rows
from experiments.composition import compose, given_overrides
from experiments.config import Experiment
from experiments.extras import OF_TASKS, missing_packages
from experiments.record import Record
from facts.estimators import Estimator

log = logging.getLogger(__name__)

MAIN = "paper"  # the collection of the main job
PARTS = ("model=", "estimator=", "search", "refit=", "analysis=", "pruning=", "finetuning=", "stages=")
Status = Literal["done", "failed", "missing", "n.a."]


@dataclass(eq=False)
class GridCell:
    """One row and column of one experiment: its configuration, unless it is n.a., and, after the run, its record."""

    experiment: str
    row: str
    column: str
    config: DictConfig | None
    status: Status = "missing"
    record: Record | None = None

    @property
    def known_config(self) -> DictConfig:
        """The configuration, for a cell that has one."""
        assert self.config is not None
        return self.config

    @property
    def data(self) -> str:
        """Network, choice of layers, data and labels, as text: what cells that share a data pass have in common."""
        config = self.known_config
        parts = (config[group][config.profile.name] for group in ("model", "task"))
        layers = list(config.excluded_names)
        return json.dumps([*(OmegaConf.to_container(part, resolve=True) for part in parts), layers, config.labels])

    @property
    def estimator(self) -> type[Estimator] | None:
        target = self.config and self.config.estimator["_target_"]
        return hydra.utils.get_class(target) if target else None


def grid_of(experiment: Experiment) -> list[GridCell]:
    """Make a cell for every row and column. Raises `ValueError` for a row or column with a choice that no group has."""
    return [cell_of(experiment, row, column) for row in experiment.rows for column in experiment.columns]


def cell_of(experiment: Experiment, row: str, column: str) -> GridCell:
    """Compose the configuration of a cell, unless it is not applicable. The overrides in `mini` precede the row's."""
    if column in experiment.not_applicable.get(row, {}):
        return GridCell(experiment.name, row, column, None, status="n.a.")
    overrides = [f"experiment={experiment.option or experiment.name}", f"task={experiment.task}"]
    overrides += [*experiment.overrides, *experiment.columns[column]]
    try:
        config = compose(*overrides, *experiment.rows[row])
        if experiment.mini and config.profile.name == "mini":
            config = compose(*overrides, *experiment.mini, *experiment.rows[row])
    except ValueError as error:
        raise ValueError(f"{experiment.name}, {row}, {column}: {error}") from error
    return GridCell(experiment.name, row, column, config)


def by_data(cells: Iterable[GridCell]) -> list[list[GridCell]]:
    """Group the cells with a configuration by network and data."""
    groups = defaultdict(list)
    for cell in cells:
        if cell.config is not None:
            groups[cell.data].append(cell)
    return list(groups.values())


def samples_of(experiments: Iterable[Experiment]) -> list[GridCell]:
    """Compose a cell for each choice of network, task and method: enough to see what a run needs."""
    samples: dict[tuple[str, ...], GridCell] = {}
    for experiment in experiments:
        for (row, own), (column, shared) in product(experiment.rows.items(), experiment.columns.items()):
            overrides = [*experiment.overrides, *shared, *own]
            kind = experiment.task, *sorted(each for each in overrides if each.startswith(PARTS))
            if kind not in samples and (cell := cell_of(experiment, row, column)).config is not None:
                samples[kind] = cell
    return list(samples.values())


def chosen_experiments(config: DictConfig) -> list[Experiment]:
    """The experiments of `experiment=`: one, a list, or those of a collection that the installed packages allow."""
    given = [override.value() for override in given_overrides() if override.key_or_group == "experiment"]
    names = given[-1] if given and isinstance(given[-1], list) else []  # Hydra would merge their files into one
    ablates = bool(config.experiment.option)
    if {config.axis is not None, config["values"] is not None} != {ablates} or (ablates and len(names) > 1):
        raise ValueError(
            "axis and values are of the experiment ablation, which needs both and is run alone: "
            "experiment=ablation axis=estimator.shrinkage_row values=[0,0.3,0.7]"
        )
    if ablates:
        return [ablation_of(config)]
    if len(names) > 1:
        return [experiment_of(name) for name in names]
    if config.experiment.name == "all":
        return possible(every_experiment())
    if config.experiment.experiments:
        return possible(map(experiment_of, config.experiment.experiments))
    return [with_rows(config.experiment)]


def every_experiment() -> list[Experiment]:
    """Every experiment of `conf/experiment`: those of the main job in its order, then the others by name."""
    options = GlobalHydra.instance().config_loader().get_group_options("experiment")
    own = [name for name in options if name not in ("ablation", "all") and not name.startswith("_")]
    nodes = {name: of_experiment(name).experiment for name in own}
    names = dict.fromkeys([*nodes[MAIN].experiments, *own])
    return [with_rows(nodes[name]) for name in names if not nodes[name].experiments]


def experiment_of(name: str) -> Experiment:
    return with_rows(of_experiment(name).experiment)


def of_experiment(name: str, *overrides: str) -> DictConfig:
    """Compose an experiment without the overrides of the command line."""
    return hydra.compose("run", overrides=[f"experiment={name}", *overrides])


def possible(experiments: Iterable[Experiment]) -> list[Experiment]:
    """Experiments whose packages are installed; for the others the log lists the missing ones."""
    able = []
    for experiment in experiments:
        if packages := missing_packages(OF_TASKS.get(experiment.task)):
            log.warning(
                "%s is left out, since %s are missing: make reproduce-all", experiment.name, ", ".join(packages)
            )
        else:
            able.append(experiment)
    return able
