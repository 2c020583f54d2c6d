"""Grids of cells: rows and columns of a table or figure, each cell with its configuration and, later, its record."""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from experiments.config import Experiment
from experiments.extras import OF_TASKS, missing_packages
from experiments.record import Record
from facts.estimators import Estimator

log = logging.getLogger(__name__)

Status = Literal["done", "failed", "missing", "n.a."]


@dataclass
class GridCell:
    """One row and column of one experiment: its configuration, if there is one, and, after the run, its record."""

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
    """Make a cell for every row and column. If a choice does not exist yet, its cell has no configuration."""
    grid = []
    own = experiment.mini if experiment.mini and compose().profile.name == "mini" else []
    for row, row_overrides in experiment.rows.items():
        for column, column_overrides in experiment.columns.items():
            if column in experiment.not_applicable.get(row, {}):
                grid.append(GridCell(experiment.name, row, column, None, status="n.a."))
                continue
            overrides = [f"experiment={experiment.name}", f"task={experiment.task}"]
            overrides += [*experiment.overrides, *column_overrides, *own, *row_overrides]
            try:
                config = compose(*overrides)
            except MissingConfigException as error:
                log.debug("%s, %s, %s: %s", experiment.name, row, column, error)
                config = None
            grid.append(GridCell(experiment.name, row, column, config))
    return grid


def compose(*overrides: str) -> DictConfig:
    """Compose a cell's configuration: the overrides of the command line, then those of the table."""
    given = [override for override in HydraConfig.get().overrides.task if not override.startswith("experiment=")]
    return hydra.compose("config", overrides=[*given, *overrides])


def by_data(cells: Iterable[GridCell]) -> list[list[GridCell]]:
    """Group the cells with a configuration by network and data."""
    groups = defaultdict(list)
    for cell in cells:
        if cell.config is not None:
            groups[cell.data].append(cell)
    return list(groups.values())


def chosen_experiments(config: DictConfig) -> list[Experiment]:
    """The experiments of `experiment=`, or every file of `conf/experiment` that the installed packages allow."""
    names = named_experiments()
    if len(names) > 1:
        return [of_experiment(name).experiment for name in names]
    if config.experiment.name != "all":
        return [config.experiment]
    return possible(every_experiment())


def named_experiments() -> list[str]:
    """The names of `experiment=[a,b]`, whose files Hydra would merge into one; empty without a list."""
    given = [override for override in HydraConfig.get().overrides.task if override.startswith("experiment=")]
    value = OverridesParser.create().parse_override(given[-1]).value() if given else None
    return value if isinstance(value, list) else []


def every_experiment() -> list[Experiment]:
    """Read every file of `conf/experiment`."""
    options = GlobalHydra.instance().config_loader().get_group_options("experiment")
    names = [name for name in options if name != "all" and not name.startswith("_")]
    return [of_experiment(name).experiment for name in names]


def of_experiment(name: str, *overrides: str) -> DictConfig:
    """Compose an experiment without the overrides of the command line."""
    return hydra.compose("config", overrides=[f"experiment={name}", *overrides])


def possible(experiments: list[Experiment]) -> list[Experiment]:
    """Experiments whose packages are installed; for the others the log lists the missing ones."""
    lacking = {experiment.name: missing_packages(OF_TASKS.get(experiment.task)) for experiment in experiments}
    for name, packages in lacking.items():
        if packages:
            log.warning("%s is left out, since %s are missing: make reproduce-all", name, ", ".join(packages))
    return [experiment for experiment in experiments if not lacking[experiment.name]]
