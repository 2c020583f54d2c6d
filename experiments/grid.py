"""Grids of cells: rows and columns of a table or figure, each cell with its configuration and, later, its record."""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
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

Status = Literal["done", "failed", "missing", "n.a."]


@dataclass
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
    grid = []
    chosen = f"experiment={experiment.option or experiment.name}"
    own = experiment.mini if experiment.mini and compose(chosen).profile.name == "mini" else []
    for row, row_overrides in experiment.rows.items():
        for column, column_overrides in experiment.columns.items():
            if column in experiment.not_applicable.get(row, {}):
                grid.append(GridCell(experiment.name, row, column, None, status="n.a."))
                continue
            overrides = [chosen, f"task={experiment.task}"]
            overrides += [*experiment.overrides, *column_overrides, *own, *row_overrides]
            try:
                config = compose(*overrides)
            except ValueError as error:
                raise ValueError(f"{experiment.name}, {row}, {column}: {error}") from error
            grid.append(GridCell(experiment.name, row, column, config))
    return grid


def by_data(cells: Iterable[GridCell]) -> list[list[GridCell]]:
    """Group the cells with a configuration by network and data."""
    groups = defaultdict(list)
    for cell in cells:
        if cell.config is not None:
            groups[cell.data].append(cell)
    return list(groups.values())


def chosen_experiments(config: DictConfig) -> list[Experiment]:
    """The experiments of `experiment=`, or every file of `conf/experiment` that the installed packages allow.

    Raises `ValueError` for `axis` or `values` without the experiment `ablation`, and for that without them.
    """
    names, ablates = named_experiments(), bool(config.experiment.option)
    if {config.axis is not None, config["values"] is not None} != {ablates} or (ablates and len(names) > 1):
        raise ValueError(
            "axis and values are of the experiment ablation, which needs both and is run alone: "
            "experiment=ablation axis=estimator.shrinkage_row values=[0,0.3,0.7]"
        )
    if ablates:
        return [ablation_of(config)]
    if len(names) > 1:
        return [experiment_of(name) for name in names]
    if config.experiment.name != "all":
        return [with_rows(config.experiment)]
    return possible(every_experiment())


def named_experiments() -> list[str]:
    """The names of `experiment=[a,b]`, whose files Hydra would merge into one; empty without a list."""
    given = [override.value() for override in given_overrides() if override.key_or_group == "experiment"]
    return given[-1] if given and isinstance(given[-1], list) else []


def every_experiment() -> list[Experiment]:
    """Read every file of `conf/experiment` but those that the command line completes."""
    options = GlobalHydra.instance().config_loader().get_group_options("experiment")
    return [experiment_of(name) for name in options if name not in ("ablation", "all") and not name.startswith("_")]


def experiment_of(name: str) -> Experiment:
    return with_rows(of_experiment(name).experiment)


def of_experiment(name: str, *overrides: str) -> DictConfig:
    """Compose an experiment without the overrides of the command line."""
    return hydra.compose("run", overrides=[f"experiment={name}", *overrides])


def possible(experiments: list[Experiment]) -> list[Experiment]:
    """Experiments whose packages are installed; for the others the log lists the missing ones."""
    lacking = {experiment.name: missing_packages(OF_TASKS.get(experiment.task)) for experiment in experiments}
    for name, packages in lacking.items():
        if packages:
            log.warning("%s is left out, since %s are missing: make reproduce-all", name, ", ".join(packages))
    return [experiment for experiment in experiments if not lacking[experiment.name]]
