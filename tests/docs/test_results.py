"""The tables of `docs/results.md` that are marked hold the numbers of the files, and defaults follow their rules."""

import warnings
from itertools import chain

import pytest

from experiments.output.report.results import of_earlier_code
from experiments.record import published_records
from facts.compression.compress import default_parts
from facts.compression.allocation import PAYS_BELOW, rounds_to
from facts.estimators.base import PLAIN_SHARE_OF_UNITS, ROW_OF_UNITS
from facts.utils.cache import content_key
from tests.docs.pages import ROOT
from tests.docs.test_readme import committed


def test_the_defaults_of_units_are_those_of_the_rule():
    """One choice after the other: the highest mean top-1 over both networks and all ratios; rounds by the distance."""
    points = committed("results/defaults/units.csv")
    once = points[points.num_rounds == 1]
    rows = once[once.plain_share == PLAIN_SHARE_OF_UNITS].groupby("shrinkage_row").top1.mean()
    assert rows.idxmax() == ROW_OF_UNITS and len(rows) == 3
    own = points[points.shrinkage_row == ROW_OF_UNITS]
    shares = own[own.num_rounds == 1].groupby("plain_share").top1.mean()
    assert shares.idxmax() == PLAIN_SHARE_OF_UNITS and len(shares) == 3
    distances = own[own.plain_share == PLAIN_SHARE_OF_UNITS].groupby(["ratio", "num_rounds"]).distance.mean().unstack()
    paid = distances[2] < distances[1]
    assert list(paid[paid].index) == [0.5, 0.6] and PAYS_BELOW == 0.6
    assert [len(rounds_to({"flops": ratio}, None, has_units=True)) for ratio in (0.5, 0.6, 0.7)] == [1, 1, 0]


def test_the_default_parts_keep_most_on_the_photos_that_choose():
    points = committed("results/photos/units.csv")
    chosen = points[points.method != "dense"].groupby("method").chosen.mean()
    assert chosen["units"] > chosen["layers, pivoted"]
    assert default_parts([]) == "units"


@pytest.mark.filterwarnings("default")
def test_committed_records_bear_their_fingerprints():
    """A warning names the tables with records of earlier code, which a run would compute again."""
    tables = {}
    for path in sorted((ROOT / "results/mini/tables").glob("*.jsonl")):
        tables[path.stem] = records = list(published_records(path.stem, ROOT / "results/mini"))
        assert len(records) == len(path.read_text().splitlines())
        for record in records:
            assert record.fingerprint == content_key(record.identity, record.model_hash, record.data_hash)
    old = {*map(id, of_earlier_code(chain(*tables.values())))}
    earlier = {name: sum(id(record) in old for record in records) for name, records in tables.items()}
    if count := sum(earlier.values()):
        named = {name: number for name, number in earlier.items() if number}
        warnings.warn(f"{count} records are of earlier code: {named}", stacklevel=1)
