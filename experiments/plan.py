"""What there is to do, and what it will take, before any of it is done: `reproduce plan=true`."""

from collections.abc import Mapping

from omegaconf import DictConfig
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from experiments.cell import Cell, instantiate
from experiments.estimate import Estimate, Rates


def state_of(config: DictConfig) -> str:
    """`done`, `failed`, `to do`, or what is missing; nothing is fetched."""
    try:
        recipe = instantiate(config.model[config.profile.name])
        if recipe.weights == "pretrained" and recipe.checkpoint() is None:
            return "weights not here"
        record = Cell.of(config).earlier_record()
    except (OSError, ValueError, ImportError) as error:
        return f"blocked ({type(error).__name__})"
    return record.status if record else "to do"


def show_cells(title: str, states: Mapping[tuple[str, str], str], console: Console) -> None:
    """One experiment's cells by row and column."""
    table = Table(title=title)
    columns = dict.fromkeys(column for _, column in states)
    for heading in ("", *columns):
        table.add_column(heading)
    for row in dict.fromkeys(row for row, _ in states):
        table.add_row(row, *(states[row, column] for column in columns))
    console.print(table)


def show_estimates(estimates: Mapping[str, tuple[int, Estimate]], rates: Rates, console: Console) -> None:
    """By network and data: how many cells there are to do, and what they take."""
    table = Table(title="What the cells that are not done will take, one after another, with nothing in the cache")
    for heading in ("network and data", "cells", "time", "memory on the device", "disk"):
        table.add_column(heading, justify="left" if heading == "network and data" else "right")
    for name, (count, need) in estimates.items():
        table.add_row(name, str(count), duration(need.seconds(rates)), decimal(need.memory), decimal(need.disk))
    total = sum(need.seconds(rates) for _, need in estimates.values())
    table.add_row("together", str(sum(count for count, _ in estimates.values())), duration(total), "", "")
    console.print(table)


def duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 1.5 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
