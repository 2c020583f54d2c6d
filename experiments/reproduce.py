"""Whole tables and figures: `python -m experiments.reproduce [experiment=NAME|all] [profile=mini|paper]`.

Which cells does each need, which are done, run the others, render. What was finished is never done again, and what
another process has under way is left to it: several at once, on machines that share the results, share the work.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.cell import Cell, run_cell
from experiments.config import CONF, Experiment
from experiments.estimate import Estimate, estimate, measure_rates
from experiments.examination import examine, show_findings
from experiments.extras import OF_TASKS, missing_packages
from experiments.figures import draw_figure
from experiments.plan import show_cells, show_estimates, state_of
from experiments.publication import publish
from experiments.record import Record
from experiments.report import write_report
from experiments.tables import Entry, Status, rank_correlations, screen_table, write_tables
from experiments.tracking import tracked
from facts import parallel
from facts.compression import moment_cache
from facts.estimators import Estimator
from facts.files import HeldElsewhere, writable_folder
from facts.layers import select_layers
from facts.moments.collect import collect_moments, in_groups

log = logging.getLogger(__name__)


@dataclass
class Place:
    """One row and column of one experiment: its configuration, if there is one, and in the end its record."""

    experiment: str
    row: str
    column: str
    config: DictConfig | None
    status: Status = "missing"
    record: Record | None = None

    @property
    def known_config(self) -> DictConfig:
        """The configuration of a place that has one."""
        assert self.config is not None
        return self.config

    @property
    def data(self) -> str:
        """The network, the data and the labels, as text: places of one kind can share a data pass."""
        config = self.known_config
        parts = (config[group][config.profile.name] for group in ("model", "task"))
        return json.dumps([*(OmegaConf.to_container(part, resolve=True) for part in parts), config.labels])

    @property
    def estimator(self) -> type[Estimator] | None:
        target = self.config and self.config.estimator["_target_"]
        return hydra.utils.get_class(target) if target else None


@hydra.main(version_base="1.3", config_path=CONF, config_name="reproduce")
def main(config: DictConfig) -> None:
    parallel.join()
    folder = writable_folder(Path(config.results) / config.profile.name)
    experiments = chosen_experiments(config)
    places = [place for experiment in experiments for place in places_of(experiment)]
    existing = [place for place in places if place.config is not None]
    log.info(
        "%d experiments, %d cells, %d of them left out", len(experiments), len(places), len(places) - len(existing)
    )

    console = Console()
    if config.plan:
        parallel.from_main(lambda: show_plan(experiments, places, config, console))
        return
    columns = by_data(existing)
    parallel.from_main(lambda: look_first(columns, config.force, console))
    for number, column in enumerate(columns, start=1):
        log.info("%s, %d cells (%d of %d)", column[0].known_config.model.name, len(column), number, len(columns))
        run_column(column)

    parallel.from_main(lambda: show_all(experiments, places, folder, config, console))
    if failed := [place for place in places if place.status == "failed"]:
        raise SystemExit(
            f"{len(failed)} of {len(places)} cells failed; their records say why. Run again to retry them."
        )


def show_all(
    experiments: list[Experiment], places: list[Place], folder: Path, config: DictConfig, console: Console
) -> None:
    """Tables and figures of what was run, and the report on everything."""
    for experiment in experiments:
        show(experiment, [place for place in places if place.experiment == experiment.name], folder, config, console)
    report_on_all(folder)
    console.print(f"Tables and figures: {folder / 'tables'}, {folder / 'figures'}; all of it: {folder / 'report.html'}")


def report_on_all(folder: Path) -> None:
    """The report on every experiment, whichever ran last, from what `folder` holds."""
    experiments = every_experiment()
    properties = {}
    for experiment in experiments:
        if experiment.properties:
            configs = {row: of_experiment(experiment.name, *overrides) for row, overrides in experiment.rows.items()}
            places = [Place(experiment.name, row, "", config) for row, config in configs.items()]
            properties[experiment.name] = properties_of(experiment, places)
    write_report(experiments, properties, folder)


def by_data(places: Iterable[Place]) -> list[list[Place]]:
    """The places that have a configuration, those together that share a network and its data."""
    columns = defaultdict(list)
    for place in places:
        if place.config is not None:
            columns[place.data].append(place)
    return list(columns.values())


def look_first(columns: list[list[Place]], force: bool, console: Console) -> None:
    """Stop before hours of work that cannot succeed; what is fine is not mentioned."""
    findings = examine([[place.known_config for place in column] for column in columns])
    if wrong := [finding for finding in findings if finding.level != "fine"]:
        show_findings(wrong, console)
    if any(finding.level == "problem" for finding in wrong) and not force:
        raise SystemExit("nothing was started; mend what is marked as a problem, or go on all the same with force=true")


def show_plan(experiments: list[Experiment], places: list[Place], config: DictConfig, console: Console) -> None:
    """The state of every cell, and what those that are not done will take."""
    states = {id(place): state_of(place.config) if place.config else place.status for place in places}
    for experiment in experiments:
        own = [place for place in places if place.experiment == experiment.name]
        show_cells(experiment.title, {(place.row, place.column): states[id(place)] for place in own}, console)
    needs: dict[str, tuple[int, Estimate]] = {}
    for column in by_data(places):
        to_do = [place for place in column if states[id(place)] in ("to do", "failed", "weights not here")]
        if left := [place.known_config for place in to_do]:
            needs[f"{left[0].model.name}, {left[0].task.name} ({len(needs) + 1})"] = len(left), estimate(left)
    show_estimates(needs, measure_rates(config.hardware.device), console)


def show(experiment: Experiment, places: list[Place], folder: Path, config: DictConfig, console: Console) -> None:
    """Draw the experiment's figure, and write its table, on the screen too; W&B gets both, and all files."""
    with tracked(config.tracking, folder, f"result-{experiment.name}", group=experiment.name) as track:
        if experiment.figure:
            path = draw_figure(experiment, places, folder / "figures")
            track(lambda run: log_figure(run, path))
        if experiment.metrics:
            entries = entries_of(experiment, places, config.profile.comparable)
            write_tables(experiment, entries, folder / "tables", properties_of(experiment, places))
            console.print(screen_table(experiment, entries))
            track(lambda run: log_table(run, entries))
        track(lambda run: publish(run, experiment, places, folder))


def chosen_experiments(config: DictConfig) -> list[Experiment]:
    """The experiment of the configuration, or every file of `conf/experiment` that what is installed allows."""
    if config.experiment.name != "all":
        return [config.experiment]
    return possible(every_experiment())


def every_experiment() -> list[Experiment]:
    """Every file of `conf/experiment`, as it is written there."""
    options = GlobalHydra.instance().config_loader().get_group_options("experiment")
    names = [name for name in options if name != "all" and not name.startswith("_")]
    return [of_experiment(name).experiment for name in names]


def of_experiment(name: str, *overrides: str) -> DictConfig:
    """A configuration of an experiment, whatever the command line says."""
    return hydra.compose("config", overrides=[f"experiment={name}", *overrides])


def possible(experiments: list[Experiment]) -> list[Experiment]:
    """Those that need nothing but what is installed; of the others the log says what they need."""
    lacking = {experiment.name: missing_packages(OF_TASKS.get(experiment.task)) for experiment in experiments}
    for name, packages in lacking.items():
        if packages:
            log.warning("%s is left out, since %s are missing: make reproduce-all", name, ", ".join(packages))
    return [experiment for experiment in experiments if not lacking[experiment.name]]


def places_of(experiment: Experiment) -> list[Place]:
    """Every row and column. A choice that does not exist yet leaves its cell without a configuration."""
    places = []
    for row, row_overrides in experiment.rows.items():
        for column, column_overrides in experiment.columns.items():
            if column in experiment.not_applicable.get(row, {}):
                places.append(Place(experiment.name, row, column, None, status="n.a."))
                continue
            overrides = [f"experiment={experiment.name}", f"task={experiment.task}"]
            overrides += [*experiment.overrides, *column_overrides, *row_overrides]
            try:
                config = compose(*overrides)
            except MissingConfigException as error:
                log.debug("%s, %s, %s: %s", experiment.name, row, column, error)
                config = None
            places.append(Place(experiment.name, row, column, config))
    return places


def compose(*overrides: str) -> DictConfig:
    """A cell's configuration: what the command line says, and on top of it what the table says."""
    given = [override for override in HydraConfig.get().overrides.task if not override.startswith("experiment=")]
    return hydra.compose("config", overrides=[*given, *overrides])


def run_column(places: list[Place]) -> None:
    """Run the cells that share a network and its data, after one data pass for all their estimators together.

    A cell that fails is recorded as failed and does not stop the others; one that another process runs comes last.
    """
    cells: list[tuple[Place, Cell]] = []
    for place in places:
        try:
            cells.append((place, parallel.everywhere(partial(Cell.of, place.known_config))))
        except Exception as error:
            place.status = "failed"
            log.error("%s, %s, %s: %s", place.experiment, place.row, place.column, error)
    try:
        parallel.everywhere(lambda: share_data_pass([cell for _, cell in cells]))
    except Exception as error:
        log.error("the shared data pass failed (%s); each cell tries on its own", error)
    held_elsewhere = [(place, cell) for place, cell in cells if not fill(place, cell, wait=False)]
    for place, cell in held_elsewhere:
        fill(place, cell, wait=True)


def fill(place: Place, cell: Cell, wait: bool) -> bool:
    """Give a place its record; False where another process runs its cell and this one is not to wait."""
    try:
        place.record, place.status = parallel.everywhere(lambda: run_cell(cell, wait)), "done"
    except HeldElsewhere:
        return False
    except Exception as error:
        place.record, place.status = parallel.from_main(cell.earlier_record), "failed"
        log.error("%s, %s, %s: %s", place.experiment, place.row, place.column, error)
    return True


def share_data_pass(cells: list[Cell]) -> None:
    """Put the union of the moments that the unfinished cells need into the cache."""
    cached = [cell for cell in cells if cell.config.cache and cell.estimator]
    records = parallel.from_main(lambda: [cell.earlier_record() for cell in cached])
    unfinished = [cell for cell, record in zip(cached, records, strict=True) if not record or record.status != "done"]
    analysed = [cell for cell in unfinished if cell.analysis and cell.analysis.needs_factors]
    collect_together(unfinished, lambda cell: cell.task.calibration(cell.model))
    collect_together(analysed, lambda cell: cell.task.analysis(cell.model)[0], in_one_pass=True)


def collect_together(
    cells: list[Cell], data_of: Callable[[Cell], Iterable[tuple[Any, Any]]], in_one_pass: bool = False
) -> None:
    """The moments that the cells' estimators need of the same data: for as many layers at a time as the memory policy
    says, or `in_one_pass` for all of them, as analyses read them."""
    moments = [moment for cell in cells if cell.estimator for moment in cell.estimator.moments]
    if not moments:
        return
    cell = cells[0]
    assert cell.cache is not None
    layers, data = select_layers(cell.model), data_of(cell)
    settings: dict[str, Any] = {"loss": cell.loss, "precision": cell.precision}
    cache = moment_cache(cell.cache, cell.model, layers, data, **settings)
    memory = replace(cell.memory, layers_at_once=None) if in_one_pass else cell.memory
    for names, kept in in_groups(layers, memory, cache):
        collect_moments(cell.model, layers, data, moments, **settings, memory=memory, cache=kept, only=names)


def properties_of(experiment: Experiment, places: list[Place]) -> dict[str, dict[str, str]]:
    """What the table says of each row's estimator, by row and title."""
    words = {True: "yes", False: "no"}
    estimators = {place.row: estimator for place in places if (estimator := place.estimator)}
    return {
        row: {title: words.get(getattr(estimator, name), "") for name, title in experiment.properties.items()}
        for row, estimator in estimators.items()
    }


def entries_of(experiment: Experiment, places: list[Place], comparable: bool) -> list[Entry]:
    """The long table: every metric of every place, the rank correlations last."""
    entries = []
    for place in places:
        for metric in experiment.metrics:
            ours = place.record.figures.get(metric) if place.record else None
            paper = experiment.paper.get(place.row, {}).get(place.column, {}).get(metric)
            entries.append(
                Entry(
                    row=place.row,
                    column=place.column,
                    metric=metric,
                    ours=ours,
                    paper=paper,
                    difference=ours - paper if comparable and ours is not None and paper is not None else None,
                    status=place.status,
                    fingerprint=place.record.fingerprint if place.record else "",
                )
            )
    return entries + rank_correlations(experiment, entries)


def log_figure(run: Any, path: Path) -> None:
    import wandb

    run.log({"figure": wandb.Image(str(path))})


def log_table(run: Any, entries: list[Entry]) -> None:
    import pandas as pd
    import wandb

    run.log({"table": wandb.Table(dataframe=pd.DataFrame(entries))})


if __name__ == "__main__":
    main()
