"""The report: everything that a results folder holds, and why the rest is not there; in a browser, and by its parts."""

import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from experiments.config import CONF, Experiment
from experiments.output.report import write_report
from experiments.output.results import update_report
from experiments.output.tables import ERRORS
from experiments.report import main
from tests.browser import WIDTHS, chromium
from tests.records import BOTH, EXPERIMENTS, LAYERS, PLAIN, REASON, write_results

RESULTS = Path(CONF).parent / "results/mini"


class Page(HTMLParser):
    """The texts of a page's tables by id, line by line, and what it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.loads: list[str] = []
        self.words: list[str] = []
        self._cell = False
        self.feed(path.read_text())
        self.text = " ".join(" ".join(self.words).split())

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


def written(folder: Path, experiments: list[Experiment] = EXPERIMENTS) -> Page:
    write_report(experiments, {}, folder)
    return Page(folder / "report.html")


def rows(page: Page, name: str) -> dict[str, list[str]]:
    return {line[0]: line[1:] for line in page.tables[f"table-{name}"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "mini"
    write_results(folder)
    return folder


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return written(folder)


def test_tables_show_ours_the_papers_and_the_best(page):
    """C is level with D; the original, which is none of the methods, is not compared."""
    assert page.tables["table-demo_50"][0] == ["", "Net", "Other"]
    shown = rows(page, "demo_50")
    assert shown["Method"] == ["GFLOPs", "paper", "Top-1", "paper", "Search [min]"] * 2
    assert shown[PLAIN] == ["1.0", "10.0", "61.5± 2.4", "56.5", "", "1.0", "", "61.5± 2.4", "", ""]
    best = [shown[row][2] for row in ("Baseline", "B", "C", "D", BOTH)]
    assert best == ["98.0± 0.7", "9.2± 1.5", "99.5± 0.4*", "100.0± 0.0*", "90.0± 1.5"]
    assert ERRORS in page.text and "A note on mini & <others>." in page.text


def test_what_is_missing_is_listed_with_the_reason(page):
    missing = {(name, state, cells): why for name, state, why, cells in page.tables["table-missing"]}
    assert missing["demo_50", "n.a.", "B, Other"] == REASON
    assert missing["demo_50", "failed", "Failing, Net; Failing, Other"] == "ValueError: 3 < 4 & no luck"
    later = missing["demo_50", "missing", "Later, Net; Later, Other"]
    assert later == "not run yet: python -m experiments.reproduce experiment=demo_50"
    assert ("demo_maps", "missing", "figure") in missing
    shown = rows(page, "demo_50")
    assert (shown["Failing"][0], shown["Later"][0], shown["B"].count("n.a.")) == ("failed", "missing", 3)
    assert "done 24 failed 4 missing 4 n.a. 2 cells in 3 tables 34" in page.text


def test_plans_seconds_and_provenance(page):
    layers = rows(page, "demo_50-plan-1")
    assert [layers[layer] for layer in LAYERS] == [["5/20"], ["10/20"], ["15/20"], ["dense"]]
    assert rows(page, "estimators") == {
        "estimator": ["cells", "repaired", "search [s]", "evaluation [s]"],
        "FACTS": ["24", "40", "30.0", "5.0"],
        "none": ["4", "8", "6.0", "1.0"],
    }
    assert "torch" in rows(page, "provenance")


def test_nothing_is_loaded_nothing_escapes_and_charts_follow_the_scheme(page, folder):
    assert all(target.startswith(("#", "data:")) for target in page.loads)
    html = (folder / "report.html").read_text()
    assert "<plain>" not in html and "<none>" not in html and "A &lt;plain&gt; &amp; simple" in html
    assert "url(http" not in html and "@import" not in html and "<code>mini</code> &amp; &lt;others&gt;" in html
    assert html.count("<img src=") == 1 and 'alt="An ablation"' in html
    assert html.count("<svg") == 2  # two networks against FLOPs
    assert "currentColor" in html and "#010203" not in html
    before = (folder / "report.html").read_bytes()
    written(folder)
    assert (folder / "report.html").read_bytes() == before


def test_differences(tmp_path):
    write_results(tmp_path, comparable=True)
    page = written(tmp_path)
    shown = rows(page, "demo_50")
    assert shown["Method"][:3] == ["GFLOPs", "paper", "difference"]
    assert shown[PLAIN][:6] == ["1.0", "10.0", "−9.0", "61.5± 2.4", "56.5", "+5.0"]
    assert "without a difference" not in page.text


def test_without_records_the_tables_stay(tmp_path):
    write_results(tmp_path, records=False)
    page = written(tmp_path)
    assert rows(page, "demo_50")[PLAIN][2] == "61.5± 2.4" and "table-provenance" not in page.tables
    assert "no record: run it again to see why" in page.text
    assert "There are no records of cells here." in (tmp_path / "report.md").read_text()


def test_a_run_makes_the_report_anew_for_what_has_changed(tmp_path, monkeypatch, capsys):
    write_results(tmp_path)
    monkeypatch.setattr("experiments.output.results.report_on_all", lambda folder: written(folder))
    for changed, rewritten in ((3, "demo_40"), (1, None), (0, None)):
        update_report(tmp_path, Console(width=200))
        line = f"changed tables and figures: {changed}; rewriting the report\n"
        assert capsys.readouterr().out == line * (changed > 0)
        if rewritten:
            (tmp_path / f"tables/{rewritten}.md").write_text(f"{changed}")


@pytest.mark.system
def test_the_command_rewrites_the_report(tmp_path, monkeypatch, capsys):
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    monkeypatch.setattr(sys, "argv", ["report", f"results={tmp_path}", *quiet])
    with pytest.raises(SystemExit, match=r"no folder .*mini: choose another with results=, or run"):
        main()
    shutil.copytree(RESULTS, tmp_path / "mini", ignore=shutil.ignore_patterns("model_sizes.*"))
    main()
    path = tmp_path / "mini/report.html"
    assert capsys.readouterr().out.strip() == str(path) and path.stat().st_size < 3e6
    assert "python -m experiments.reproduce experiment=model_sizes" in Page(path).text
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1400, "height": WIDTHS[1400]})
        tab.goto(path.as_uri())
        assert tab.evaluate("document.documentElement.scrollHeight") < 12_000
        boxes = "[...document.querySelectorAll('.scroll')].filter((box) => box.checkVisibility())"
        assert tab.evaluate(f"{boxes}.filter((box) => box.scrollWidth > box.clientWidth).length") == 0


@pytest.mark.system
def test_in_a_browser_it_sorts_switches_its_scheme_and_fits_every_screen(page, folder):
    """No error is reported and nothing fetched; empty cells stay last, and a third click restores the order."""
    troubles: list[str] = []
    address = (folder / "report.html").as_uri()
    with chromium() as browser:
        for width, height in WIDTHS.items():
            tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark")
            tab.on("console", lambda message: troubles.append(message.text))
            tab.on("pageerror", lambda error: troubles.append(str(error)))
            tab.on("request", lambda asked: asked.url.startswith((address, "data:")) or troubles.append(asked.url))
            tab.goto(address)
            assert tab.locator("#table-demo_50").is_visible() and not tab.locator("#table-demo_ablation").is_visible()
            tab.locator("nav a[href='#demo_ablation']").click()
            assert tab.locator("#table-demo_ablation").is_visible()
            tab.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert all(shown.is_visible() for shown in tab.locator("table").all())
        heading = tab.locator("#table-demo_50 th[scope=col]").nth(3)
        values = "[...document.querySelectorAll('#table-demo_50 tbody tr')].map((row) => row.cells[3].innerText)"
        before, seen = tab.evaluate(values), {}
        for _ in range(3):
            heading.locator("button").press("Enter")
            seen[heading.get_attribute("aria-sort")] = tab.evaluate(values)
        done = ["9.2 ± 1.5", "61.5 ± 2.4", "90.0 ± 1.5", "98.0 ± 0.7", "99.5 ± 0.4*", "100.0 ± 0.0*"]
        last = ["failed", "missing"]
        assert seen == {"ascending": [*done, *last], "descending": [*reversed(done), *last], "none": before}
        ground = "getComputedStyle(document.body).backgroundColor"
        grounds = [tab.evaluate(ground)]
        for _ in range(2):
            tab.locator("#scheme").click()
            grounds.append(tab.evaluate(ground))
        assert grounds[0] == grounds[2] != grounds[1]
    assert troubles == []
