"""Pages hold the tables and numbers of docstrings and records, and defaults follow their rules."""

import re
import warnings
from collections import Counter
from io import StringIO

import pandas as pd
import pytest
from omegaconf import OmegaConf

from experiments.output.report import is_outdated
from experiments.record import published_records
from facts.compression.compress import default_parts
from facts.estimators.base import PLAIN_SHARE_OF_UNITS, ROW_OF_UNITS
from facts.search.budget import Budget
from facts.utils.cache import content_key
from tests.docs.pages import ROOT, committed, maker, run

render, loose_numbers = maker["render"], maker["loose_numbers"]
WRITTEN = [*maker["PAGES"], *sorted(ROOT.glob("results/*/tables/*.md")), *ROOT.glob("results/*/report.md")]


@pytest.mark.parametrize("page", maker["PAGES"], ids=lambda page: page.name)
def test_pages_hold_what_docstrings_and_records_give(page, monkeypatch):
    monkeypatch.setattr("measurements.text", committed)
    assert page.read_text() == render(page.read_text()), "docstrings or records have changed: make docs"
    assert loose_numbers(page) == [], "decimals belong in a table of docs/make_tables.py"


def test_a_table_follows_its_records_and_needs_them(monkeypatch):
    page = "before\n<!-- table: digits -->\n| 1 |\n<!-- end -->\nafter"
    records = committed("results/mini/tables/classification_50.csv")
    for row, value in (("FACTS", "12.34"), ("PELA", "56.78")):
        records = re.sub(rf"^({row},DeiT-B,top1),[\d.]+", rf"\1,{value}", records, flags=re.MULTILINE)
    monkeypatch.setattr("measurements.text", lambda path: records)
    lines = render(page).splitlines()
    assert lines[:2] == ["before", "<!-- table: digits -->"] and lines[-2:] == ["<!-- end -->", "after"]
    assert [line[:14] for line in lines if "12.3" in line or "56.8" in line] == ["| PELA | 56.8 ", "| FACTS | 12.3"]
    records = records.replace("FACTS,DeiT-B,top1", "FACTS,DeiT-B,other")
    with pytest.raises(ValueError, match=r"^0 lines of classification_50, not one, have ours and FACTS, DeiT-B, top1$"):
        render(page)


def test_decimals_stand_in_tables_alone(tmp_path):
    page = tmp_path / "results.md"
    page.write_text("<!-- table: digits -->\n| 0.1 |\n<!-- end -->\nof `0.5` in 3 [draws](a.0.2.md), 1,234.5 without")
    assert loose_numbers(page) == ["1,234.5"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_tables_are_read_at_a_glance(page):
    for line in page.read_text().splitlines():
        assert not line.startswith("|") or line.count(" | ") < 8, line


def test_the_map_names_every_table_and_figure_of_the_paper():
    main = OmegaConf.load(ROOT / "conf/experiment/main.yaml").experiments
    assert sorted(maker["IN_PAPER"].values()) == sorted(name for name in main if not name.startswith("beyond"))


def read(path: str) -> pd.DataFrame:
    return pd.read_csv(StringIO(committed(f"results/photos/{path}.csv")))


def test_the_defaults_of_units_are_those_of_the_rule():
    """One choice after the other: the highest mean top-1 over both networks and all ratios."""
    means = read("tables/unit_defaults").query("metric == 'chosen'").groupby("row").ours.mean()
    rows = {float(row.removeprefix("alpha_R ")): row for row in means.index if row.startswith("alpha_R ")}
    shares = {0: "no plain share", PLAIN_SHARE_OF_UNITS: rows[ROW_OF_UNITS], 1: "nothing but a plain share"}
    assert len(rows) == len(shares) == 3
    assert max(rows, key=lambda row: means[rows[row]]) == ROW_OF_UNITS
    assert max(shares, key=lambda share: means[shares[share]]) == PLAIN_SHARE_OF_UNITS


def test_the_default_parts_keep_most_on_the_photos_that_choose():
    chosen = read("tables/units").query("metric == 'chosen'").groupby("row").ours.mean()
    assert chosen["Units: FACTS + CoRS-Fisher"] > chosen["Layers, pivoted: FACTS + CoRS-Fisher"]
    points = read("tables/tokens").query("metric == 'chosen'")
    chosen = points[~points.column.str.endswith("30 %")].groupby("row").ours.mean()
    assert chosen["Units and tokens: FACTS + CoRS-Fisher"] > chosen["Units: FACTS + CoRS-Fisher"]
    assert [default_parts([], Budget.of(cost=cost)) for cost in ("flops", "params")] == ["units,tokens", "units"]


@pytest.mark.filterwarnings("default")
def test_committed_records_bear_their_fingerprints():
    """A warning names the tables with outdated records, which a run would compute again."""
    if not (ROOT / ".git").exists():
        pytest.skip("no commit to read records from")
    outdated, tracked = Counter(), run("git ls-files 'results/*/tables/*.jsonl'", ROOT).split()  # not this machine's
    for path in map(ROOT.joinpath, tracked):
        records = list(published_records(path.stem, path.parents[1]))
        assert len(records) == len(path.read_text().splitlines())
        for record in records:
            assert record.fingerprint == content_key(record.identity, record.model_hash, record.data_hash)
        outdated[path.stem] += sum(map(is_outdated, records))
    if outdated.total():
        warnings.warn(f"{outdated.total()} records are outdated: {dict(+outdated)}", stacklevel=1)
