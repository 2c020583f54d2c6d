"""What has been measured, from `results/`: values of tables, and leads of methods with their standard errors."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.record import mean_difference, unpacked

ROOT = Path(__file__).parents[1]

BASES = "DeiT-B", "Swin-B", "ConvNeXt-B", "MambaVision-B"
TINY = "DeiT-Tiny", "ViT-Tiny"
BOTH, UNITS = "Units and tokens: FACTS + CoRS-Fisher", "Units: FACTS + CoRS-Fisher"
TOKENS, TOME, DENSE = "Tokens: FACTS + CoRS-Fisher", "Tokens: ToMe", "Dense"
HALVES = "top1", "chosen"  # of the validation photos


@cache
def text(path: str) -> str:
    return (ROOT / path).read_text()


def read(path: str) -> pd.DataFrame:
    return pd.read_csv(StringIO(text(path)))


def table(name: str) -> pd.DataFrame:
    """Read a CSV of `results/`: `pivoted` is `mini/tables/pivoted`, `photos/units` is `photos/tables/units`."""
    profile, _, file = name.rpartition("/")
    return read(f"results/{name}.csv" if "/" in profile else f"results/{profile or 'mini'}/tables/{file}.csv")


def at(name: str, *words: str, of: str = "ours") -> float:
    """Look up the value in the only line of a CSV that holds all words, such as row, column and metric."""
    lines = table(name)
    matching = np.ones(len(lines), dtype=bool)
    for word in words:
        matching &= (lines.astype(str) == word).any(axis=1).to_numpy()
    found = lines[matching][of].dropna()
    if len(found) != 1:
        raise ValueError(f"{len(found)} lines of {name}, not one, have {of} and {', '.join(words)}")
    return float(found.iloc[0])


def on_all_photos(row: str, column: str, name: str = "photos/tokens") -> float:
    """Average the top-1 of both halves of the validation photos, which are equally large."""
    return (at(name, row, column, "top1") + at(name, row, column, "chosen")) / 2


def distance(row: str, column: str) -> float:
    """Mean distance of the outputs from the original's, on all photos."""
    return sum(at("photos/tokens", row, column, half) for half in ("distance", "chosen_distance")) / 2


def record_of(row: str, column: str, name: str = "photos/tokens") -> dict:
    """Read the record of a cell of a table, which for several draws is the first's."""
    lines = table(name).query("row == @row and column == @column").dropna(subset="fingerprint")
    profile, _, file = name.rpartition("/")
    return _records(text(f"results/{profile or 'mini'}/tables/{file}.jsonl"))[lines.fingerprint.iloc[0]]


@cache
def _records(lines: str) -> dict[str, dict]:
    """Read records by fingerprint; each names the `draws` of its cell, itself among them."""
    records, draws = [*map(json.loads, lines.splitlines())], defaultdict[str, list[dict]](list)
    for record in records:
        record["draws"] = draws[json.dumps(_of_any_draw(record["config"]), sort_keys=True)]
        record["draws"].append(record)
    return {record["fingerprint"]: record for record in records}


def _of_any_draw(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {name: _of_any_draw(value) for name, value in config.items() if name not in ("experiment", "seed")}


def error_of(row: str, other: str, column: str, metrics: Iterable[str] = HALVES, name: str = "photos/tokens") -> float:
    """Compute the standard error of a difference in points, photo by photo or, if it is larger, draw by draw."""
    better, worse = (
        np.stack(
            [np.concatenate([unpacked(draw["outcomes"][metric]) for metric in metrics]) for draw in record["draws"]]
        )
        for record in (record_of(each, column, name) for each in (row, other))
    )
    return 100 * mean_difference(better, worse)[1]


def ahead(row: str, other: str, column: str, halves: Collection[str] = HALVES) -> tuple[float, float]:
    """Compute how many points one row is ahead of another on these photos, and the standard error."""
    apart = [at("photos/tokens", row, column, half) - at("photos/tokens", other, column, half) for half in halves]
    return float(np.mean(apart)), error_of(row, other, column, halves)


def kept_parameters(row: str, column: str) -> float:
    return record_of(row, column)["metrics"]["mparams"] / record_of(DENSE, column)["metrics"]["mparams"]


Lead = tuple[float, float]  # and its standard error, NaN if that is not known


def lead_over(
    name: str, row: str, others: Iterable[str], columns: Iterable[str] = (), metric: str = "top1", of: str = "ours"
) -> Lead:
    """Average over columns how far a row is ahead of the best of others."""
    values = table(name).query("metric == @metric").pivot(index="row", columns="column", values=of)
    columns, errors = [*columns] or [*values.columns[values.loc[row].notna()]], []
    best = values.loc[[*others], columns].idxmax()
    for column in columns:
        try:
            errors.append(error_of(row, best[column], column, [metric], name))
        except KeyError:  # no outcomes: as if on different photos
            lines = table(name).query("column == @column and metric == @metric and row in (@row, @best[@column])")
            errors.append(np.linalg.norm(lines.get("standard_error", np.nan)) if len(lines) == 2 else np.nan)
    gaps = [values.loc[row, column] - values.loc[best[column], column] for column in columns]
    return float(np.mean(gaps)), float(np.linalg.norm(errors) / len(columns))


def lead_over_closest(profile: str, of: str) -> Lead:
    """Average over networks how far FACTS is ahead of the estimator whose factors are closest to the Fisher."""
    name, leads = f"{profile}fisher_estimators", []
    cosines = table(name).query("metric == 'cosine'").pivot(index="row", columns="column", values=of)
    for column, closest in cosines.idxmax().items():
        leads.append(lead_over(name, "FACTS", [closest], [column], of=of))
    values, errors = zip(*leads, strict=True)
    return float(np.mean(values)), float(np.linalg.norm(errors) / len(errors))
