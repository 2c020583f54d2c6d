"""Variants that take turns, and their table on the screen."""

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table


def interleaved(variants: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every variant, `repeats` times in turn, after one untimed round."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in track(range(repeats + 1), "rounds"):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def show(what: str, title: str, seconds: dict[str, list[float]]) -> None:
    """A table of the variants; ratios are to the first of them."""
    table = Table(title=title)
    for heading in (what, "median [s]", "fastest [s]", "ratio of medians"):
        table.add_column(heading, justify="left" if heading == what else "right")
    middle = medians(seconds)
    plain = next(iter(middle.values()))
    for name, median in middle.items():
        table.add_row(name, f"{median:.2f}", f"{min(seconds[name]):.2f}", f"{median / plain:.2f}")
    Console().print(table)
