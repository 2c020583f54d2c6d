"""Ranks that searches gave to the layers, as shares of the ranks at which the layers would cost the same."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from experiments.output.report.experiment_result import ExperimentResult
from experiments.record import Record

FullRanks = dict[tuple[str, str, str], int]
"""By network (its hash), form and layer, the rank at which the layer costs as much as dense."""


@dataclass(frozen=True)
class Bar:
    """`rank` is None for a layer left dense, `full` if it is unknown; `share` is the length of the bar."""

    rank: int | None
    full: int | None
    share: float


@dataclass(frozen=True)
class PlanTable:
    """The plans of one network: for each layer a bar a method (None if a method's plan lacks the layer)."""

    network: str
    methods: list[str]
    layers: dict[str, list[Bar | None]]

    @property
    def relative(self) -> bool:
        """Whether bars are relative to the largest rank, since the full ranks are unknown."""
        return any(bar and bar.rank and not bar.full for bars in self.layers.values() for bar in bars)


def full_ranks(records: Iterable[Record]) -> FullRanks:
    """Compute full ranks from the sensitivity profiles, which list ranks with their shares of them."""
    return {
        (record.model_hash, _form(record), layer): round(points[-1][0] / points[-1][1])
        for record in records
        for layer, points in record.profile.items()
    }


def _form(record: Record) -> str:
    return record.config.get("form", "plain")  # records made before there was a choice


def plan_tables(result: ExperimentResult, full: FullRanks) -> list[PlanTable]:
    """Make one table a network, of the cells whose search may give different ratios to layers."""
    networks: dict[str, dict[str, Record]] = defaultdict(dict)
    for (row, column), record in result.records.items():
        if record.plan and not record.config["search"]["_target_"].endswith(".Uniform"):
            networks[column][row] = record
    return [_table(network, records, full) for network, records in networks.items()]


def _table(network: str, records: dict[str, Record], full: FullRanks) -> PlanTable:
    layers = dict.fromkeys(layer for record in records.values() for layer in record.plan)
    bars = {layer: [_bar(record, layer, full) for record in records.values()] for layer in layers}
    return PlanTable(network, list(records), bars)


def _bar(record: Record, layer: str, full: FullRanks) -> Bar | None:
    if layer not in record.plan:
        return None
    rank, whole = record.plan[layer], full.get((record.model_hash, _form(record), layer))
    if rank is None:
        return Bar(None, whole, 1.0)
    return Bar(rank, whole, rank / (whole or max(filter(None, record.plan.values()))))
