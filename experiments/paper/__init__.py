"""The paper's values: one CSV per experiment, one line per value."""

import csv
from pathlib import Path

FOLDER = Path(__file__).parent


def paper_values(experiment: str) -> dict[tuple[str, str, str], float]:
    """Read the published values by row, column and metric; empty for an experiment without a file, such as your own."""
    path = FOLDER / f"{experiment}.csv"
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {(line["row"], line["column"], line["metric"]): float(line["paper"]) for line in csv.DictReader(file)}
