"""Tables: what is shown, what is compared, what is not; outcomes of samples and their errors."""

import json
import re
from dataclasses import replace
from io import StringIO
from math import inf, nan
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from experiments import paper
from experiments.cell import Cell
from experiments.compose import CONF
from experiments.config import Experiment
from experiments.grid import completed, every_experiment
from experiments.output import tables
from experiments.output.entries import entries_of, read_entries
from experiments.output.findings import leaders_of
from experiments.output.tables import as_text, panels_of, write_tables
from experiments.record import errors_apart, packed, paired_difference, standard_error, unpacked, write_records
from tests.records import demo, make_record, outcomes, place, write_paper

RESULTS = Path(CONF).parent / "results"
NUM_SAMPLES, NUM_RESAMPLES = 400, 20_000
# The spread of so many resamples is off by 1 / sqrt(2 * 20,000) = 0.5 %, and n - 1 for n makes 0.1 %.
TOLERANCE = 0.03


@pytest.fixture
def experiment(tmp_path, monkeypatch) -> Experiment:
    """A table of which the paper has every number."""
    top1 = dict(zip(("Baseline", *"ABCDEF", "Later"), (90, 10, 20, 30, 40, 50, 60, 70), strict=True))
    monkeypatch.setattr(paper, "FOLDER", tmp_path / "paper")
    write_paper(paper.FOLDER / "demo.csv", top1)
    chosen = {"title": "A demonstration at 50 %", "metrics": {"gflops": "GFLOPs", "top1": "Top-1"}}
    rows = {name: [] for name in top1} | {"Baseline": ["estimator=none"]}
    return demo(**chosen, rows=rows, unranked=["Baseline", "Later"], notes=["A note."])


def measured(top1: dict[str, float], **fields) -> list[Cell]:
    """Cells with the outcomes of 400 test samples behind their top-1."""
    made = (make_record(row, metrics={"gflops": 1.0, "top1": top1[row]}, outcomes=outcomes(top1[row])) for row in top1)
    return [place(record.fingerprint, record, **fields) for record in made]


def panels(experiment: Experiment, *metrics: dict[str, float]) -> list[tuple[str, pd.DataFrame]]:
    """What is shown where the cells of a row, in every column, have these metrics."""
    rows = [(row, make_record(metrics=own)) for row, own in zip(experiment.rows, metrics, strict=True)]
    cells = [place(*row, column) for row in rows for column in experiment.columns]
    return list(panels_of(experiment, entries_of(experiment, cells, False)))


def test_methods_that_read_the_same_are_named_together_and_columns_counted_where_none_leads_in_all():
    chosen = {"metrics": {"perplexity": "Perplexity"}, "ranked_by": "perplexity", "axis_title": "bound"}
    experiment = demo(rows={"A": [], "B": [], "C": []}, columns={"Net": [], "Other": [], "Third": []}, **chosen)
    values = {"A": (14.81, 20, 30), "B": (14.79, 20, 40), "C": (15, 19, 41)}
    cells = [
        place(row, make_record(metrics={"perplexity": value}), column)
        for row, own in values.items()
        for column, value in zip(experiment.columns, own, strict=True)
    ]
    entries = entries_of(experiment, cells, comparable=False)
    expected = "bound: A (2 of 3 columns, lead not tested)", "21.6, less is better"
    assert leaders_of(experiment, entries) == expected
    two = [replace(entry, ours=18.9) if (entry.row, entry.column) == ("B", "Other") else entry for entry in entries]
    assert leaders_of(experiment, two)[0] == "bound: A; B (2 of 3 columns, lead not tested)"


def shown(entries, metric="top1") -> dict[str, str]:
    return {entry.row: as_text(entry) for entry in entries if entry.metric == metric and entry.status != "missing"}


def test_errors_of_the_top1_are_shown_and_methods_level_with_the_best_marked(experiment, tmp_path):
    """Three images more, of 400, are less than two standard errors; that the original is ahead does not count."""
    entries = entries_of(experiment, measured({"Baseline": 98, "A": 61.5, "B": 62.25, "C": 25}), comparable=False)
    expected = {"Baseline": "98.0 ± 0.7", "A": "61.5 ± 2.4*", "B": "62.2 ± 2.4*", "C": "25.0 ± 2.2"}
    assert shown(entries) == expected
    assert [entry for entry in entries if entry.metric == "gflops" and entry.standard_error is not None] == []
    write_tables(experiment, entries, tmp_path)
    same = [replace(entry, ours=62.23) if entry.row == "A" and entry.metric == "top1" else entry for entry in entries]
    (_, panel), *_ = panels_of(experiment, same)
    assert [text for text in panel.stack() if text.startswith("**62.2")] == ["**62.2 ± 2.4**"] * 2  # they read the same
    for suffix, best in (("md", "**62.2 ± 2.4**"), ("tex", r"\textbf{62.2 ± 2.4}")):
        text = (tmp_path / f"demo.{suffix}").read_text()
        assert all(value in text for value in ({**expected, "B": best}.values()))
        assert tables.ERRORS in text and "A note." in text
        assert suffix == "tex" or "**Best, or level with the best: B; A.**" in text
    level = entries_of(experiment, measured({"A": 61.5, "B": 62.25}), comparable=False)
    write_tables(replace(experiment, title="Half of d_in^2"), entries, tmp_path)
    assert r"\caption{Half of d\_in\^{}2." in (tmp_path / "demo.tex").read_text()
    unknown = [replace(entry, standard_error=None, behind=None) for entry in entries]
    assert leaders_of(experiment, entries) == ("B; A", "62.2 (98.0)")
    assert leaders_of(experiment, level) == ("all 2, level", "62.2")
    assert leaders_of(experiment, unknown) == ("B (lead not tested)", "62.2 (98.0)")
    assert leaders_of(experiment, entries, "paper") == ("F", "60.0 (90.0)")
    table = pd.read_csv(tmp_path / "demo.csv")
    behind = table[table.metric == "top1"].set_index("row").behind
    assert pd.isna(behind["Baseline"]) and behind["B"] == 0
    assert 1.7 < behind["A"] < 1.8 and behind["C"] > 10


def test_of_several_draws_means_are_shown_and_differences_must_exceed_both_errors(experiment, tmp_path):
    """By images, A and B are level and C is behind; D's draws lie so far apart that it is level again."""
    draws = [{"A": 62.5, "B": 62.25, "C": 40, "D": 60}, {"A": 62.25, "B": 62.5, "C": 40.25, "D": 36}]
    experiment.seeds = len(draws)
    cells = [cell for draw, top1 in enumerate(draws) for cell in measured(top1, draw=draw)]
    entries = entries_of(experiment, cells, comparable=False)
    top1 = {entry.row: entry for entry in entries if entry.metric == "top1"}
    assert (top1["A"].ours, top1["A"].fingerprint) == (62.375, "A")
    assert top1["D"].deviation == pytest.approx(24 / 2**0.5)
    assert [top1[row].behind < 2 for row in "ABCD"] == [True, True, False, True]
    assert as_text(top1["C"]) == "40.1 ± 2.5 (0.2)"
    write_tables(experiment, entries, tmp_path)
    assert "- Where values differ between 2 draws of the calibration sample" in (tmp_path / "demo.md").read_text()
    cells[-4] = replace(cells[-4], record=None, error="no luck")
    assert shown(entries_of(experiment, cells, comparable=False))["A"] == "failed"


@pytest.mark.parametrize("comparable", [True, False])
def test_a_difference_to_the_paper_needs_the_data_of_the_paper(experiment, tmp_path, comparable):
    entries = entries_of(experiment, measured({"A": 12.5}), comparable)
    (top1,) = [entry for entry in entries if entry.row == "A" and entry.metric == "top1"]
    assert top1.difference == (2.5 if comparable else None)
    write_tables(experiment, entries, tmp_path)
    markdown = (tmp_path / "demo.md").read_text()
    assert ("Top-1 (difference)" in markdown) == (" 2.5 |" in markdown) == comparable


def test_tables_are_written_in_three_forms_and_show_what_is_missing_or_failed(experiment, tmp_path):
    ours = {"A": 12.5, "B": 20.0, "C": 50.0, "E": 60.0, "F": 70.0}
    cells = [*measured(ours), place("D", make_record("D", "failed", error="no"))]
    write_tables(experiment, entries_of(experiment, cells, comparable=False), tmp_path)
    table = pd.read_csv(tmp_path / "demo.csv")
    columns = ["row", "column", "metric", "ours", "paper", "difference", "status", "fingerprint"]
    assert list(table.columns) == [*columns, "standard_error", "deviation", "behind"]
    top1 = table[table.metric == "top1"].set_index("row")
    assert top1.status.loc[["A", "D", "Later"]].tolist() == ["done", "failed", "missing"]
    assert top1.ours["A"] == 12.5 and top1.paper["Later"] == 70
    markdown, latex = ((tmp_path / f"demo.{suffix}").read_text() for suffix in ("md", "tex"))
    assert r"\caption{A demonstration at 50 \%. Net. A note. " in latex
    for text in (markdown, latex):
        assert all(word in text for word in ("12.5", "failed", "missing", "A note."))


def right(count: int) -> np.ndarray:
    """The first so many of the samples count."""
    return np.arange(NUM_SAMPLES) < count


def bootstrapped(values: np.ndarray) -> float:
    """The spread of the mean over resamples."""
    chosen = np.random.default_rng(0).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    return float(values[chosen].mean(axis=1).std())


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_outcomes_come_back_as_they_were(outcomes):
    assert unpacked(packed(torch.tensor(outcomes))).tolist() == outcomes


@pytest.mark.parametrize("count", [0, 20, 246, 392, NUM_SAMPLES])
def test_the_standard_error_is_the_bootstraps(count):
    assert standard_error(right(count)) == pytest.approx(100 * bootstrapped(1.0 * right(count)), rel=TOLERANCE)


def test_errors_apart_are_those_of_the_paired_bootstrap():
    better, worse = np.random.default_rng(1).random((2, NUM_SAMPLES)) < [[0.7], [0.6]]
    difference = 1.0 * better - worse
    found = errors_apart(better, worse)
    assert found == pytest.approx(difference.mean() / bootstrapped(difference), rel=TOLERANCE)
    assert found > 1 and errors_apart(worse, better) == -found
    assert errors_apart(right(200), right(200)) == 0 and errors_apart(right(NUM_SAMPLES), right(0)) == inf


def test_of_several_draws_the_larger_error_counts():
    """Two errors hold 95.45 % of a normal distribution; of Student's t with two degrees of freedom, 4.5266 do."""
    shares = [[[0.7], [0.7], [0.7]], [[0.6], [0.5], [0.2]]]
    better, worse = np.random.default_rng(1).random((2, 3, NUM_SAMPLES)) < shares
    means = (1.0 * better - worse).mean(axis=1)
    assert errors_apart(better, worse) == pytest.approx(
        2 / 4.5266 * means.mean() / (means.std(ddof=1) / 3**0.5), rel=1e-4
    )
    assert errors_apart(better[:1], worse[:1]) == errors_apart(better[0], worse[0])
    assert standard_error(better) == pytest.approx(100 * bootstrapped(better.mean(axis=0)), rel=TOLERANCE)


def test_a_difference_on_the_same_samples_has_the_error_of_the_difference():
    """Of 400 samples, 20 more are right: five points, and an error of a third of two independent ones."""
    first, second = (make_record(metrics={"top1": value}, outcomes=outcomes(value)) for value in (60.0, 55.0))
    difference, error = paired_difference(first, second, "top1")
    assert difference == pytest.approx(5) and error == pytest.approx(100 * (0.05 * 0.95 / 400) ** 0.5, rel=0.01)
    assert paired_difference(first, make_record(metrics={"top1": 58.0}), "top1") == (2, pytest.approx(nan, nan_ok=True))


def test_rows_of_the_papers_devices_follow_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "FOLDER", tmp_path / "paper")
    paper.FOLDER.mkdir()
    (paper.FOLDER / "demo.csv").write_text("row,column,metric,paper\nV100,Net,speedup,1.6\n")
    metrics = {"compressed_throughput": "Low rank", "speedup": "Speed-up"}
    experiment = demo(figure="throughput", metrics=metrics, ranked_by="speedup", rows={"This device": []})
    ((_, table),) = panels(experiment, {"compressed_throughput": 120.0, "speedup": 1.2})
    assert table.reset_index().to_numpy().tolist() == [["This device", "120.0", "1.20"], ["V100 (paper)", "", "1.60"]]


def test_errors_that_are_alike_stand_in_the_caption(experiment, tmp_path):
    cells = measured({"Baseline": 70, "A": 61.5, "B": 62.25})
    write_tables(experiment, entries_of(experiment, cells, comparable=False), tmp_path)
    text = (tmp_path / "demo.md").read_text()
    assert (
        "- Standard errors of Top-1 are 2.3 to 2.4; of differences on the same images, mostly less." in text
        and "±" not in text
        and "61.5*" in text
    )


def many(figure: str = "", columns: int = 9) -> Experiment:
    networks = {f"{'AB'[number % 2]}, {number} %": [] for number in range(columns)}
    rows = {"a method with a name that needs more than half of a line": [], "second": []}
    return demo(title="A long title " * 8, figure=figure, columns=networks, rows=rows, metrics={"top1": "T", "x": "X"})


def test_a_network_has_a_table_of_its_own_where_there_are_many_columns():
    heads = [(heading, [*panel]) for heading, panel in panels(many(), *[{"top1": 50.0}] * 2)]
    assert heads == [("A, T", ["0 %", "2 %", "4 %", "6 %", "8 %"]), ("B, T", ["1 %", "3 %", "5 %", "7 %"])]


@pytest.mark.parametrize(("profile", "name"), [("mini", "small Net"), ("paper", "Net")])
def test_stand_ins_are_called_small_but_not_in_the_papers_values(configured, tmp_path, monkeypatch, profile, name):
    monkeypatch.setattr(paper, "FOLDER", tmp_path)
    write_paper(tmp_path / "demo.csv", {"A": 80.0})
    configured("reproduce", f"profile={profile}")
    columns = {"Net": ["model=deit_b"], "40 %": ["ratio=0.4"]}
    ((_, panel),) = panels(completed(demo(columns=columns, rows={"A": []})), {"top1": 1.0})
    assert [*panel] == [name, "40 %", "Net (paper)"]
    columns = {f"Net, {ratio} %": ["model=deit_b"] for ratio in range(5)}
    ((heading, _),) = panels(completed(demo(columns=columns, rows={"A": []})), {"top1": 1.0})
    assert heading == f"{name}, Top-1"


def test_a_ranking_is_sorted_by_means():
    experiment = many("ranking", columns=2)
    ((_, panel),) = panels(experiment, {"top1": 1.0}, {"top1": 3.0})
    assert [*panel.index] == [*experiment.rows][::-1] and panel["mean"].tolist() == ["**3.0**", "1.0"]


@pytest.mark.parametrize("profile", ["mini", "photos"])
def test_tables_of_all_results_fit_a_terminal_and_no_cell_takes_three_lines(configured, profile):
    configured("reproduce", f"profile={profile}")
    shown = []
    for experiment in every_experiment():
        entries = read_entries(RESULTS / profile / "tables" / f"{experiment.name}.csv")
        shown += tables.screen_tables(experiment, entries) if entries else ()
    for table in shown:
        console = Console(width=200, file=StringIO())
        console.print(table, width=tables.SCREEN)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= tables.SCREEN and "…" not in console.file.getvalue()
        assert len(lines) <= 2 * table.row_count + 8
    assert len(shown) > 3


def test_records_for_readers_elsewhere_do_not_say_where_the_results_lay(tmp_path):
    config = {"results": str(tmp_path), "task": {"crops": f"{tmp_path}/crops", "names": ["deit", f"{tmp_path}_other"]}}
    record, path = make_record(config=config), tmp_path / "demo.jsonl"
    write_records([record, record], path)
    (line,) = path.read_text().splitlines()
    expected = {"results": "results", "task": {"crops": "results/crops", "names": ["deit", f"{tmp_path}_other"]}}
    assert json.loads(line)["config"] == expected
    lines = [line for each in RESULTS.rglob("*.jsonl") for line in each.read_text().splitlines()]
    assert len(lines) > 300 and [line[:80] for line in lines if re.search(r'"/[^"]', line)] == []
