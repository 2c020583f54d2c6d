"""The report: everything that a results folder holds, and why the rest is not there."""

import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hydra import initialize_config_dir

from experiments.config import CONF, Experiment
from experiments.grid import every_experiment
from experiments.output.report import write_report
from experiments.output.report.experiment_result import read_result
from experiments.output.report.plans import full_ranks, plan_tables
from experiments.output.results import report_on_all
from experiments.output.tables import ERRORS
from experiments.record import published_records
from experiments.report import main
from tests.results_folder import BOTH, EXPERIMENTS, LAYERS, PLAIN, REASON, write_results

RESULTS = Path(CONF).parent / "results/mini"


class Page(HTMLParser):
    """The texts of a page's tables by id, line by line, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.loads: list[str] = []
        self.words: list[str] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.loads += [given[name] for name in ("src", "href", "xlink:href", "srcset") if name in given]
        match tag:
            case "table":
                self._lines = self.tables[given["id"]] = []
            case "tr":
                self._lines.append([])
            case "td" | "th":
                self._lines[-1].append("")
                self._cell = True

    def handle_endtag(self, tag):
        self._cell &= tag not in ("td", "th")

    def handle_data(self, data):
        self.words.append(data)
        if self._cell:
            self._lines[-1][-1] += data.strip()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def written(folder: Path, experiments: list[Experiment] = EXPERIMENTS) -> Page:
    write_report(experiments, {}, folder)
    return Page((folder / "report.html").read_text())


@pytest.fixture
def page(tmp_path) -> Page:
    write_results(tmp_path)
    return written(tmp_path)


def test_every_table_is_there_with_ours_and_the_papers(page):
    assert {"table-demo_40", "table-demo_50", "table-demo_ablation"} <= page.tables.keys()
    heads, rows = page.tables["table-demo_50"][:3], {line[0]: line[1:] for line in page.tables["table-demo_50"][3:]}
    assert heads[0] == ["Method", "Net", "Other"]
    assert heads[1] == ["GFLOPs", "Top-1", "Search [min]"] * 2
    assert heads[2] == ["ours", "paper"] * 4
    assert rows[PLAIN] == ["1.0", "10.0", "61.5± 2.4", "56.5", "", "1.0", "", "61.5± 2.4", "", ""]


def test_the_best_methods_are_marked_and_the_differences_counted(page):
    """C is level with D; the original, which is none of the methods, is not compared."""
    rows = {line[0]: line[1:] for line in page.tables["table-demo_50"][3:]}
    shown = [rows[row][2] for row in ("Baseline", "B", "C", "D", BOTH)]
    assert shown == ["98.0± 0.7", "9.2± 1.5", "99.5± 0.4*", "100.0± 0.0*", "90.0± 1.5"]
    assert re.fullmatch(r"1(\.0)? \(n=5, p=\S+\)", rows["Ranking agreement"][2])
    assert rows["Ranking agreement"][7] == ""  # the paper has no number for this network
    assert [rows["Pairs apart"][column] for column in (2, 7)] == ["9 of 10", "5 of 6"]
    assert ERRORS in page.text and "A note on mini & <others>." in page.text


def test_a_table_of_two_methods_has_no_agreement(page):
    rows = {line[0]: line[1:] for line in page.tables["table-demo_ablation"][2:]}
    assert "Ranking agreement" not in rows and rows["Pairs apart"] == ["0 of 1"]
    assert set(rows) == {"0.5", "none", "Pairs apart"}


def test_differences_are_shown_where_the_data_are_the_papers(tmp_path):
    write_results(tmp_path, comparable=True)
    page = written(tmp_path)
    assert page.tables["table-demo_50"][2] == ["ours", "paper", "difference"] * 4
    rows = {line[0]: line[1:] for line in page.tables["table-demo_50"][3:]}
    assert rows[PLAIN][:6] == ["1.0", "10.0", "−9.0", "61.5± 2.4", "56.5", "+5.0"]
    assert "no difference is computed" not in page.text


def test_values_of_another_source_are_called_by_it(tmp_path):
    write_results(tmp_path)
    other = replace(EXPERIMENTS[1], published_in="README")
    page = written(tmp_path, [EXPERIMENTS[0], other])
    assert page.tables["table-demo_40"][2] == ["ours", "paper"] * 4
    assert page.tables["table-demo_50"][2] == ["ours", "README"] * 4
    assert "correlation with the README by" in page.text
    before, _, after = page.text.rpartition("Tables beyond the paper")
    assert "Tables of the paper" in before and other.title in after and EXPERIMENTS[0].title not in after


def test_what_is_missing_is_said_with_the_reason(page):
    rows = {tuple(line[:2]): line[2:] for line in page.tables["table-missing"][1:]}
    assert rows["demo 50", "n.a."] == ["B, Other", REASON]
    assert rows["demo 50", "failed"] == ["Failing, Net; Failing, Other", "ValueError: 3 < 4 & no luck"]
    assert rows["demo 50", "missing"] == [
        "Later, Net; Later, Other",
        "not run yet:python -m experiments.reproduce experiment=demo_50",
    ]
    assert rows["demo maps", "missing"][0] == "the figure"
    states = {line[0]: line for line in page.tables["table-demo_50"]}
    assert [states[row][1] for row in ("Failing", "Later")] == ["failed", "missing"]
    assert states["B"].count("n.a.") == 3
    assert "done 24 failed 4 missing 4 not applicable 2 cells in 3 tables 34" in page.text


def test_packages_that_are_missing_are_named_with_the_command(tmp_path, without_module):
    without_module("lm_eval")
    experiment = Experiment(
        name="words",
        title="Words",
        task="language",
        metrics={"x": "X"},
        ranked_by="x",
        columns={"N": []},
        rows={"A": []},
    )
    (gap,) = read_result(experiment, {}, tmp_path).gaps
    assert gap.reason == "lm_eval not installed: `make install-llm`"


def test_nothing_is_loaded_and_nothing_escapes(page, tmp_path):
    assert all(target.startswith(("#", "data:")) for target in page.loads)
    html = (tmp_path / "report.html").read_text()
    assert "<plain>" not in html and "<none>" not in html and "A &lt;plain&gt; &amp; simple" in html
    assert "url(http" not in html and "@import" not in html
    assert "<code>mini</code> &amp; &lt;others&gt;" in html


def test_figures_and_charts_are_in_the_page(page, tmp_path):
    html = (tmp_path / "report.html").read_text()
    assert html.count("<img src=") == 1 and 'alt="An ablation"' in html
    assert html.count("<svg") == 3  # two networks against FLOPs, and one profile that all cells share
    assert "currentColor" in html and "#010203" not in html and "#0072b2" not in html.partition("</style>")[2]


def test_bars_are_ranks_over_full_ranks(tmp_path):
    write_results(tmp_path)
    result = read_result(EXPERIMENTS[1], {}, tmp_path)
    for full, shares in ((full_ranks(result.records.values()), (0.25, 0.5, 0.75, 1)), ({}, (1 / 3, 2 / 3, 1, 1))):
        plan, other = plan_tables(result, full)
        assert (plan.network, plan.methods, other.network) == ("Net", [BOTH], "Other")
        assert tuple(plan.layers) == LAYERS
        assert tuple(bar.share for (bar,) in plan.layers.values()) == pytest.approx(shares)
        assert plan.relative == (not full)


def test_seconds_are_summed_over_cells(page):
    heads, *lines = page.tables["table-seconds-1"]
    seconds = {line[0]: dict(zip(heads[1:], line[1:], strict=True)) for line in lines}
    assert seconds["demo 50"] == {
        "cells": "13",
        "search [s]": "16.5",
        "evaluation [s]": "2.8",
        "repaired factors": "22",
    }
    assert {line[0] for line in page.tables["table-seconds-2"][1:]} == {"FACTS", "none"}


def test_without_records_tables_stay_and_the_rest_is_said(tmp_path):
    write_results(tmp_path, records=False)
    page = written(tmp_path)
    assert page.tables["table-demo_50"][4][3] == "61.5± 2.4"
    assert "The records of 28 cells are not in records/" in page.text
    assert "No record with a sensitivity profile is here." in page.text
    assert "its record is not here: run it again to see why" in page.text
    assert "No record of a cell is here." in (tmp_path / "report.md").read_text()


def test_the_same_folder_gives_the_same_page(tmp_path):
    write_results(tmp_path)
    texts = []
    for _ in range(2):
        written(tmp_path)
        texts.append((tmp_path / "report.html").read_bytes())
    assert texts[0] == texts[1]


@pytest.mark.system
def test_every_experiment_is_reported_whichever_ran(tmp_path):
    folder = tmp_path / "mini"
    shutil.copytree(RESULTS / "tables", folder / "tables")
    with initialize_config_dir(CONF, version_base="1.3"):
        report_on_all(folder)
        experiments = every_experiment()
    page = Page((folder / "report.html").read_text())
    short = (folder / "report.md").read_text()
    assert "[report.html](report.html)" in short
    for experiment in experiments:
        assert experiment.title in short
        assert (f"table-{experiment.name}" in page.tables) == bool(experiment.metrics)
    assert page.tables["table-fisher_estimators"][0][1:3] == ["token-local", "act-grad coupling"]
    tables = "".join(path.read_text() for path in (folder / "tables").glob("*.csv"))
    published = {record.fingerprint for each in experiments for record in published_records(each.name, folder)}
    cells = re.search(r"^(\d+) cells, the last one on", short, re.MULTILINE)
    assert cells and int(cells[1]) == sum(fingerprint in tables for fingerprint in published) > 300
    figures = {line[0] for line in page.tables["table-missing"][1:] if "the figure" in line[2]}
    assert figures == {experiment.name.replace("_", " ") for experiment in experiments if experiment.figure}


@pytest.mark.system
def test_the_command_writes_the_report_anew_from_what_is_there(tmp_path, monkeypatch, capsys):
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    monkeypatch.setattr(sys, "argv", ["report", f"results={tmp_path}", *quiet])
    with pytest.raises(
        SystemExit, match=r"no folder .*mini: choose another with results=, or run experiments.reproduce"
    ):
        main()
    (tmp_path / "mini").mkdir()
    main()
    path = tmp_path / "mini/report.html"
    assert capsys.readouterr().out.strip() == str(path)
    assert "python -m experiments.reproduce experiment=model_sizes" in Page(path.read_text()).text
