"""Pages hold the tables and numbers of docstrings and records, and defaults follow their rules."""

import runpy
import subprocess
import warnings
from collections import Counter
from functools import lru_cache
from io import StringIO

import pandas as pd
import pytest

from experiments.output.report import is_outdated
from experiments.record import published_records
from facts.compression.compress import default_parts
from facts.estimators.base import PLAIN_SHARE_OF_UNITS, ROW_OF_UNITS
from facts.search.budget import Budget
from facts.utils.cache import content_key
from tests.docs.pages import ROOT, run

maker = runpy.run_path(str(ROOT / "docs/make_tables.py"))
render, loose_numbers = maker["render"], maker["loose_numbers"]


@lru_cache
def committed(path: str) -> pd.DataFrame:
    """A table as it was committed: runs on this machine write their own numbers there."""
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip(f"no commit to read {path} from")
    return pd.read_csv(StringIO(shown.stdout))


@pytest.mark.parametrize("page", maker["PAGES"], ids=lambda page: page.name)
def test_pages_hold_what_docstrings_and_records_give(page, monkeypatch):
    monkeypatch.setitem(render.__globals__, "read", committed)
    assert page.read_text() == render(page.read_text()), "docstrings or records have changed: make docs"
    assert loose_numbers(page) == []


def test_a_number_follows_its_record_and_needs_one(tmp_path, monkeypatch):
    records = pd.DataFrame({"row": ["FACTS", "PELA"], "column": "40 %", "ours": [83.46, 70.0]})
    monkeypatch.setitem(render.__globals__, "read", lambda path: records)
    ahead = '<!--= at("a", "FACTS", "40 %") - at("a", "PELA") -->{}<!--/-->'
    assert render(ahead.format("12.6") + '<!--? at("a", "FACTS") > 83 -->').startswith(ahead.format("13.5"))
    for page, problem in (
        ('<!--= at("a", "ASVD") -->0.1<!--/-->', "0 lines of a, not one, have ours and ASVD"),
        ('<!--= at("a", "40 %") -->0.1<!--/-->', "2 lines of a"),
        ('better <!--? at("a", "PELA") > at("a", "FACTS") -->', "contradict"),
    ):
        with pytest.raises(ValueError, match=problem):
            render(page)
    (tmp_path / "results.md").write_text(f"{ahead.format('13.5')} of `0.5` in 3 draws, 1,234.5 without")
    assert loose_numbers(tmp_path / "results.md") == ["1,234.5"]


def test_the_defaults_of_units_are_those_of_the_rule():
    """One choice after the other: the highest mean top-1 over both networks and all ratios."""
    points = committed("results/photos/earlier/unit_defaults.csv")
    once = points[points.num_rounds == 1]
    rows = once[once.plain_share == PLAIN_SHARE_OF_UNITS].groupby("shrinkage_row").top1.mean()
    assert rows.idxmax() == ROW_OF_UNITS and len(rows) == 3
    own = points[points.shrinkage_row == ROW_OF_UNITS]
    shares = own[own.num_rounds == 1].groupby("plain_share").top1.mean()
    assert shares.idxmax() == PLAIN_SHARE_OF_UNITS and len(shares) == 3


def test_the_default_parts_keep_most_on_the_photos_that_choose():
    points = committed("results/photos/tables/units.csv").query("metric == 'chosen'")
    chosen = points.groupby("row").ours.mean()
    assert chosen["Units: FACTS + CoRS-Fisher"] > chosen["Layers, pivoted: FACTS + CoRS-Fisher"]
    points = committed("results/photos/tables/tokens.csv")
    chosen = points[(points.metric == "chosen") & ~points.column.str.endswith("30 %")].groupby("row").ours.mean()
    assert chosen["Units and tokens: FACTS + CoRS-Fisher"] > chosen["Units: FACTS + CoRS-Fisher"]
    assert [default_parts([], Budget.of(cost=cost)) for cost in ("flops", "params")] == ["units,tokens", "units"]


@pytest.mark.filterwarnings("default")
def test_committed_records_bear_their_fingerprints():
    """A warning names the tables with outdated records, which a run would compute again."""
    outdated = Counter()
    if not (ROOT / ".git").exists():
        pytest.skip("no commit to read records from")
    tracked = run("git ls-files 'results/*/tables/*.jsonl'", ROOT).split()  # not those of runs on this machine
    for path in map(ROOT.joinpath, tracked):
        records = list(published_records(path.stem, path.parents[1]))
        assert len(records) == len(path.read_text().splitlines())
        for record in records:
            assert record.fingerprint == content_key(record.identity, record.model_hash, record.data_hash)
        outdated[path.stem] += sum(map(is_outdated, records))
    if outdated.total():
        warnings.warn(f"{outdated.total()} records are outdated: {dict(+outdated)}", stacklevel=1)
