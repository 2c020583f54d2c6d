"""Tables: what is shown, what is compared, and what is not."""

from dataclasses import replace

import pandas as pd
import pytest
from omegaconf import OmegaConf

from experiments import paper
from experiments.config import Experiment
from experiments.grid import GridCell
from experiments.output.results import properties_of
from experiments.output.tables import entries_of, write_tables
from tests.records import make_record
from tests.results_folder import write_paper

METHODS = ["A", "B", "C", "D"]


@pytest.fixture
def experiment(tmp_path, monkeypatch) -> Experiment:
    """A table of which the paper has every number."""
    top1 = dict(zip(("Baseline", *METHODS, "Later"), (90, 10, 20, 30, 40, 50), strict=True))
    monkeypatch.setattr(paper, "FOLDER", tmp_path / "paper")
    write_paper(paper.FOLDER / "demo.csv", top1)
    return Experiment(
        name="demo",
        title="A demonstration at 50 %",
        metrics={"gflops": "GFLOPs", "top1": "Top-1"},
        ranked_by="top1",
        columns={"Net": []},
        rows={name: [] for name in ("Baseline", *METHODS, "Later")},
        unranked=["Baseline", "Later"],
        notes=["A note."],
    )


def places(top1: dict[str, float], failed: str | None = None) -> list[GridCell]:
    made = [
        GridCell("demo", name, "Net", None, "done", make_record(name, metrics={"gflops": 1.0, "top1": value}))
        for name, value in top1.items()
    ]
    if failed:
        made.append(GridCell("demo", failed, "Net", None, "failed", make_record(failed, "failed", error="no")))
    return [*made, GridCell("demo", "Later", "Net", None)]


def test_the_ranking_of_the_methods_is_compared_by_spearman(experiment):
    ours = {"Baseline": 99, "A": 1, "B": 3, "C": 2, "D": 4}
    (correlation,) = [e for e in entries_of(experiment, places(ours), comparable=False) if e.row == "Spearman"]
    assert correlation.ours == pytest.approx(1 - 6 * 2 / (4 * 15))  # two neighbours swapped


def test_ties_and_too_few_methods_give_no_made_up_ranking(experiment):
    for ours in ({"A": 1, "B": 1, "C": 1}, {"A": 1, "B": 2}):
        assert not [e for e in entries_of(experiment, places(ours), False) if e.row == "Spearman"]


@pytest.mark.parametrize("comparable", [True, False])
def test_a_difference_to_the_paper_needs_the_data_of_the_paper(experiment, comparable):
    entries = entries_of(experiment, places({"A": 12.5}), comparable)
    (top1,) = [entry for entry in entries if entry.row == "A" and entry.metric == "top1"]
    assert top1.difference == (2.5 if comparable else None)


@pytest.mark.parametrize("comparable", [True, False])
def test_the_written_table_shows_the_difference_where_there_is_one(experiment, tmp_path, comparable):
    write_tables(experiment, entries_of(experiment, places({"A": 12.5}), comparable), tmp_path, {})
    markdown = (tmp_path / "demo.md").read_text()
    assert ("Net Top-1 (difference)" in markdown) == comparable
    assert ("| 2.5 " in markdown) == comparable


def test_tables_are_written_in_three_forms_and_show_what_is_missing_or_failed(experiment, tmp_path):
    entries = entries_of(experiment, places({"A": 12.5, "B": 20.0, "C": 50.0}, failed="D"), comparable=False)
    write_tables(experiment, entries, tmp_path, {})
    table = pd.read_csv(tmp_path / "demo.csv")
    columns = ["row", "column", "metric", "ours", "paper", "difference", "status", "fingerprint"]
    assert list(table.columns) == columns
    top1 = table[table.metric == "top1"].set_index("row")
    assert top1.status.loc[["A", "D", "Later"]].tolist() == ["done", "failed", "missing"]
    assert top1.ours["A"] == 12.5 and top1.paper["Later"] == 50
    markdown, latex = ((tmp_path / f"demo.{suffix}").read_text() for suffix in ("md", "tex"))
    assert r"\caption{A demonstration at 50 \%. A note.}" in latex
    for text in (markdown, latex):
        assert all(word in text for word in ("12.5", "failed", "missing", "A note.", "Spearman"))


def test_properties_of_the_estimators_stand_beside_their_rows(experiment, tmp_path):
    experiment.properties = {"token_local": "token-local", "couples": "act-grad coupling"}
    made = [replace(place, config=config(place.row)) for place in places({"Baseline": 9, "A": 1, "B": 2})]
    properties = properties_of(experiment, made)
    assert properties["A"] == {"token-local": "yes", "act-grad coupling": "yes"}
    assert properties["B"] == {"token-local": "no", "act-grad coupling": "no"}
    assert set(properties) == {"A", "B"}
    write_tables(experiment, entries_of(experiment, made, comparable=False), tmp_path, properties)
    header, _, *rows = (tmp_path / "demo.md").read_text().splitlines()[2:]
    assert [cell.strip() for cell in header.split("|")[1:4]] == ["Method", "token-local", "act-grad coupling"]
    assert [cell.strip() for cell in rows[2].split("|")[1:4]] == ["B", "no", "no"]


def config(row: str):
    targets = {"A": "facts.estimators.FACTS", "B": "facts.estimators.KFACReduce"}
    return OmegaConf.create({"estimator": {"_target_": targets.get(row)}})


def test_a_table_that_the_paper_does_not_have_has_no_column_for_it(experiment, tmp_path):
    experiment.name, experiment.axis = "beyond", "alpha"
    write_tables(experiment, entries_of(experiment, places({"A": 1.5}), comparable=False), tmp_path, {})
    text = (tmp_path / "beyond.md").read_text()
    assert "(paper)" not in text and "| alpha" in text and "Spearman" not in text
