"""The report: everything that a results folder holds, and why the rest is not there; in a browser, and by its parts."""

import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from unittest.mock import patch

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.console import Console

from experiments.output.report import provenance, read_result, write_report
from experiments.output.results import report_on_all, show
from experiments.output.tables import MARKS
from experiments.report import main
from tests.docs.pages import ROOT, run
from tests.records import BOTH, EXPERIMENTS, PLAIN, REASON, demo, make_record, place, write_results

QUIET = ["no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
QUIET += ["disable-component-update", "disable-sync"]
WIDTHS = {1400: 1000, 390: 844}  # and heights: a desk and a phone
CELL = re.compile("<(?:td|th)[ >].*?</t[dh]>", re.DOTALL)


@contextmanager
def chromium():
    """The browser, by Playwright; skips the test if either is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[test]'")
    if not (path := shutil.which("chromium")):
        pytest.skip("needs Debian's chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=[f"--{flag}" for flag in QUIET])
        yield browser
        browser.close()


def text_of(cell: str) -> str:
    return "".join(part.strip() for part in unescape(re.sub("<[^>]+>", "\0", cell)).split("\0"))


class Page:
    """The texts of a page's tables by id, line by line, and what it would load."""

    def __init__(self, path: Path) -> None:
        self.path, html = path, path.read_text()
        self.loads = re.findall(r'\b(?:src|href|srcset)="([^"]*)"', html)
        self.text = " ".join(unescape(re.sub("<[^>]+>", " ", html)).split())
        self.tables = {
            name: [[*map(text_of, CELL.findall(line))] for line in lines.split("<tr")[1:]]
            for name, lines in re.findall(r'<table id="([^"]+)"(.*?)</table>', html, re.DOTALL)
        }

    def rows(self, name: str) -> dict[str, list[str]]:
        return {line[0]: line[1:] for line in self.tables[f"table-{name}"]}


def written(folder: Path, own: str = "") -> Page:
    with patch("experiments.output.report.is_ours", lambda name: name != own):
        write_report(EXPERIMENTS, folder)
    return Page(folder / "report.html")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    folder = tmp_path_factory.mktemp("report") / "mini"
    write_results(folder)
    return written(folder)


def test_a_users_own_table_comes_first(tmp_path):
    write_results(tmp_path)
    text = written(tmp_path, own="demo_ablation").text
    assert text.index("Your own") < text.index("Tables of the paper") and "Your own" not in written(tmp_path).text


def test_it_begins_with_what_figures_show(tmp_path):
    """As their files say; ablations are left out."""
    write_results(tmp_path)
    for name in ("demo_maps", "demo_ablation"):
        title = PngInfo()
        title.add_text("Title", f"What {name} shows")
        Image.new("RGB", (1, 1)).save(tmp_path / f"figures/{name}.png", pnginfo=title)
    page = written(tmp_path)
    summary = page.path.with_suffix(".md").read_text().partition("## ")[0]
    assert "- [demo maps](figures/demo_maps.png): What demo_maps shows.\n" in summary
    assert "What demo_maps shows." in page.text and "What demo_ablation shows" not in summary + page.text


def test_tables_show_ours_the_papers_and_the_best(page):
    """C is level with D; the original, which is none of the methods, is not compared."""
    shown = page.rows("demo_50")
    assert shown["Method"] == ["Net", "Other", "Net (paper)"]
    assert shown[PLAIN] == ["61.5 ± 2.4", "61.5 ± 2.4", "56.5"]
    best = [shown[row][0] for row in ("Baseline", "B", "C", "D", BOTH)]
    assert best == ["98.0 ± 0.7", "9.2 ± 1.5", "99.5 ± 0.4*", "100.0 ± 0.0", "90.0 ± 1.5"]
    assert page.rows("leaders-1")["A demonstration at 50 %"] == ["D; C", "100.0 (98.0)", "D", "95.0 (93.0)"]
    assert page.text.count(MARKS) == 1 and "A note on mini & <others>." in page.text


def test_what_is_missing_is_listed_with_the_reason(page):
    missing = {(name, state, cells): why for name, state, why, cells in page.tables["table-missing"]}
    assert missing["demo_50", "n.a.", "B, Other"] == REASON
    assert missing["demo_50", "failed", "Failing, Net; Failing, Other"] == "ValueError: 3 < 4 & no luck"
    command = "python -m experiments.reproduce experiment=demo_50"
    assert missing["demo_50", "missing", "Later, Net; Later, Other"] == f"not run yet: {command}"
    assert "Without results in this folder: demo_maps." in page.text
    shown = page.rows("demo_50")
    assert (shown["Failing"][0], shown["Later"][0], shown["B"].count("n.a.")) == ("failed", "missing", 1)
    assert "done 24 failed 4 missing 4 n.a. 2 tables not begun 0 cells in 3 tables 34" in page.text


def test_provenance(page):
    """It counts every record of a table, also of later draws, by machine."""
    assert "torch" in page.rows("provenance")
    results = (read_result(experiment, page.path.parent) for experiment in EXPERIMENTS)
    first, *others = (record for result in results for record in result.draws)
    elsewhere = replace(first, machine={**first.machine, "processor": "another"})
    lines = provenance([elsewhere, first, *others]).value
    assert (
        lines["measured before the code changed"].endswith(f" of {len(others) + 2} records")
        and lines["torch"] == first.versions["torch"]
    )
    assert lines["processor"] == f"{first.machine['processor']} ({len(others) + 1}), another (1)"


def test_nothing_is_loaded_nothing_escapes(page):
    assert all(target.startswith(("#", "data:")) for target in page.loads)
    html = page.path.read_text()
    assert "<plain>" not in html and "<none>" not in html and "A &lt;plain&gt; &amp; simple" in html
    assert "url(http" not in html and "@import" not in html and "<code>mini</code> &amp; &lt;others&gt;" in html
    assert html.count("<img src=") == 1 and 'alt="An ablation"' in html
    assert written(page.path.parent).path.read_text() == html


@pytest.mark.attack
def test_a_foreign_table_and_a_damaged_line_are_named_and_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("experiments.output.results.every_experiment", lambda: [demo(rows={"A": []})])
    path, damaged = tmp_path / "tables/mine.yaml", tmp_path / "tables/demo.jsonl"
    path.parent.mkdir()
    damaged.write_bytes(b"\xff\n")
    path.write_text("name: mine\nmetrics: {top1: T}\nranked_by: top5\nrows: {A: []}\ncolumns: {Net: []}")
    report_on_all(tmp_path)
    assert f"{path} is left out: experiment/mine.yaml: ranked_by must be one of top1" in caplog.text
    path.write_text("name: mine\nmetrics: {top1: T}\nranked_by: top1\nrows: {A: []}\ncolumns: {Net: []}\ndefault: B")
    report_on_all(tmp_path)
    assert "experiment/mine.yaml: default must be one of A, or empty" in caplog.text
    path.write_text("name: mine\nmetrics: {top1: T}\nranked_by: top1\nrows: {A: []}\ncolumns: {Net: []}\ndrawn: [B]")
    report_on_all(tmp_path)
    assert "experiment/mine.yaml: drawn has B, but rows are A" in caplog.text
    assert f"a line of {damaged} is damaged or of another version, and left out: " in caplog.text
    assert (tmp_path / "report.html").exists()


def test_brackets_are_shown(cell_config, tmp_path, capsys):
    shown = demo(title="Test [/b]", rows={"A [ours]": []}, columns={"[net]": []}, axis_title="[axis]")
    cells = [place("A [ours]", make_record(metrics={"top1": 1.0}), "[net]")]
    show(shown, cells, tmp_path, cell_config(), Console())
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("Test [/b]", "A [ours]", "[net]", "[axis]"))


@pytest.mark.system
def test_the_command_rewrites_the_report(command, tmp_path):
    with pytest.raises(SystemExit, match=r"no folder .*mini: choose another with results=, or run"):
        command(main)
    if not (ROOT / ".git").exists():
        pytest.skip("no commit to read the results from")
    run(f"git archive HEAD results/mini | tar -x --strip-components=1 -C {tmp_path}", ROOT)
    for table in (tmp_path / "mini/tables").glob("model_sizes.*"):
        table.unlink()
    path, drawn = tmp_path / "mini/report.html", [*tmp_path.glob("mini/[tf]*/*.[cmtj]*")]
    committed = {path: path.read_bytes() for path in drawn}
    assert command(main).strip() == str(path) and path.stat().st_size < 3e6
    assert "Without results in this folder: model_sizes, " in Page(path).text
    assert "search_methods stays as it is: none of its cells" in command(main, "experiment=search_methods")
    assert [path for path, content in committed.items() if path.read_bytes() != content] == [] and len(drawn) > 100
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1400, "height": WIDTHS[1400]})
        tab.goto(path.as_uri())
        assert tab.evaluate("document.documentElement.scrollHeight") < 12_000
        boxes = "[...document.querySelectorAll('.scroll')].filter((box) => box.checkVisibility())"
        assert tab.evaluate(f"{boxes}.filter((box) => box.scrollWidth > box.clientWidth).length") == 0


@pytest.mark.system
def test_in_a_browser_it_sorts_switches_its_scheme_and_fits_every_screen(page):
    """No error is reported and nothing fetched; empty cells stay last, and a third click restores the order."""
    troubles, address = [], page.path.as_uri()
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
        heading = tab.locator("#table-demo_50 th[scope=col]").nth(1)
        values = "[...document.querySelectorAll('#table-demo_50 tbody tr')].map((row) => row.cells[1].innerText)"
        before, seen = tab.evaluate(values), {}
        for _ in range(3):
            heading.locator("button").press("Enter")
            seen[heading.get_attribute("aria-sort")] = tab.evaluate(values)
        done = ["9.2 ± 1.5", "61.5 ± 2.4", "90.0 ± 1.5", "98.0 ± 0.7", "99.5 ± 0.4*", "100.0 ± 0.0"]
        up, down = ([*order, "failed", "missing"] for order in (done, reversed(done)))
        assert seen == {"ascending": up, "descending": down, "none": before}
        grounds = []
        for _ in range(3):
            grounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
            tab.locator("#scheme").click()
        assert grounds[0] == grounds[2] != grounds[1]
    assert troubles == []
