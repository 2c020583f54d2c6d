"""Records as cells leave them, made up."""

from typing import Any

from experiments.record import Record
from facts.cost.count import Cost
from facts.result import Summary


def make_summary(**fields: Any) -> Summary:
    return Summary(before=Cost(2, 2), after=Cost(1, 1), **{"repaired": {}, "seconds": {}, **fields})


def make_record(fingerprint: str = "f", status: str = "done", **fields: Any) -> Record:
    return Record(fingerprint, status, **{"config": {}, "identity": {}, "model_hash": "m", "data_hash": "d", **fields})
