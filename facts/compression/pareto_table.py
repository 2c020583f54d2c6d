"""The table of a comparison: a row for each point, in memory and in a CSV."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facts.cost.count import Cost
from facts.utils.extras import needing
from facts.utils.files import replacing

with needing("experiments", "a comparison"):
    import pandas as pd

log = logging.getLogger(__name__)

ORIGINAL = "original"
FINGERPRINT = "fingerprint"


@dataclass
class ParetoTable:
    """Rows by fingerprint; with a file, in a CSV too."""

    rows: dict[str, dict[str, Any]]
    file: Path | None

    @classmethod
    def read(cls, file: Path | None) -> "ParetoTable":
        """Read the table. Raises `ValueError` for a file that holds something else."""
        if file is None or not file.exists():
            return cls({}, file)
        try:
            rows = pd.read_csv(file, dtype={FINGERPRINT: str}).set_index(FINGERPRINT).to_dict("index")
        except (KeyError, ValueError) as error:
            raise ValueError(f"{file} is no table of this kind ({error}): move it, or name another file") from error
        return cls(rows, file)

    def add(self, key: str, row: dict[str, Any], metrics: dict[str, float]) -> None:
        self.rows[key] = row | metrics
        values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        log.info("%s, %s, %s, %g: %s", row["estimator"], row["search"], row["form"], row["ratio"], values)
        if self.file:
            with replacing(self.file) as path:
                self.of(self.rows).to_csv(path, index=False)

    def of(self, keys: Iterable[str]) -> pd.DataFrame:
        """Rows of these fingerprints, in this order, without those that are missing."""
        found = [self.rows[key] | {FINGERPRINT: key} for key in keys if key in self.rows]
        return pd.DataFrame(found)


def table_row(
    estimator: str, search: str, form: str, ratio: float, cost: Cost, latency: float | None, seconds: float
) -> dict[str, Any]:
    """A row without metrics. `latency` is in seconds."""
    return {
        "estimator": estimator,
        "search": search,
        "form": form,
        "ratio": ratio,
        "flops": cost.flops,
        "params": cost.params,
        "latency_ms": latency and 1000 * latency,
        "seconds": seconds,
    }


def efficient(cost: pd.Series, quality: pd.Series) -> pd.Series:
    """Mark the points that no other beats: none costs less for the same quality, or is better for the same cost."""
    return pd.Series(
        [
            not (((cost <= own) & (quality > value)) | ((cost < own) & (quality >= value))).any()
            for own, value in zip(cost, quality, strict=True)
        ],
        index=cost.index,
    )
