"""The report in a real browser: no errors, all tables, sortable, readable on a phone, in light and in dark."""

import io
import shutil
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from PIL import Image

from experiments.config import CONF
from experiments.output.report import write_report
from experiments.output.results import report_on_all
from tests.browser import WIDTHS, chromium
from tests.results_folder import BOTH, write_results

pytestmark = pytest.mark.system

RESULTS = Path(CONF).parent / "results/mini"
SCHEMES = ("light", "dark")

# The contrast of every visible text to what lies behind it, gradients included, and that of the charts' lines.
CONTRASTS = """() => {
  const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const over = ([r, g, b, a], [R, G, B]) => [[r, R], [g, G], [b, B]].map(([x, X]) => (x * a + X * (255 - a)) / 255);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const behind = (element) => {
    if (!element) return [[255, 255, 255]];
    const style = getComputedStyle(element);
    const below = rgba(style.backgroundColor)[3] === 255 ? [[0, 0, 0]] : behind(element.parentElement);
    const plain = below.map((color) => over(rgba(style.backgroundColor), color));
    const stripes = (style.backgroundImage.match(/rgba?\\([^)]*\\)/g) ?? []).map(rgba);
    return [...plain, ...stripes.flatMap((stripe) => plain.map((color) => over(stripe, color)))];
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const written = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!written || !element.checkVisibility() || element.closest("svg, script")) continue;
    const color = rgba(getComputedStyle(element).color);
    found.push([Math.min(...behind(element).map((ground) => ratio(over(color, ground), ground))), element.outerHTML]);
  }
  const ground = over(rgba(getComputedStyle(document.body).backgroundColor), [255, 255, 255]);
  const lines = [...document.querySelectorAll("svg path[style*='stroke: var(--series']")];
  const strokes = lines.map((path) => [ratio(rgba(getComputedStyle(path).stroke), ground), path.outerHTML]);
  return {texts: found, lines: strokes};
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """The results of the repository, and a small folder with a cell of every fate."""
    real, small = tmp_path_factory.mktemp("real") / "mini", tmp_path_factory.mktemp("small")
    for kind in ("tables", "figures"):
        shutil.copytree(RESULTS / kind, real / kind)
    with initialize_config_dir(CONF, version_base="1.3"):
        report_on_all(real)
    write_report(write_results(small), {}, small)
    return {"real": real / "report.html", "small": small / "report.html"}


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def opened(browser, pages):
    """Opens a page at a width and in a scheme; in the end no error may have been reported and nothing been fetched."""
    troubles, tabs = [], []

    def build(name: str, width: int = 1400, scheme: str = "light"):
        tab = browser.new_page(viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme)
        tabs.append(tab)
        address = pages[name].as_uri()
        tab.on("console", lambda message: troubles.append(message.text))
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        tab.on("request", lambda request: request.url.startswith((address, "data:")) or troubles.append(request.url))
        tab.goto(address)
        return tab

    yield build
    for tab in tabs:
        tab.close()
    assert troubles == []


def unfold(tab) -> None:
    tab.evaluate("document.querySelectorAll('main details').forEach((details) => { details.open = true; })")


@pytest.mark.parametrize("name", ["real", "small"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_table_is_in_sight_and_the_page_does_not_overflow(opened, name, width):
    tab = opened(name, width)
    unfold(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("table").count() >= 4
    for table in tab.locator("table").all():
        assert table.is_visible() and table.locator("tbody tr").count() > 0
    cut = """() => [...document.querySelectorAll("main *:not(.scroll *, svg *)")].filter((element) => {
      const box = element.getBoundingClientRect();
      return element.checkVisibility() && box.width && (box.left < -1 || box.right > innerWidth + 1);
    }).map((element) => element.outerHTML.slice(0, 200))"""
    assert tab.evaluate(cut) == []


@pytest.mark.parametrize("name", ["real", "small"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_stands_out_from_its_ground(opened, name, scheme):
    tab = opened(name, scheme=scheme)
    unfold(tab)
    contrasts = tab.evaluate(CONTRASTS)
    assert len(contrasts["texts"]) > 100 and len(contrasts["lines"]) > 10
    for kind, least in (("texts", 4.5), ("lines", 3)):
        assert [(ratio, element[:200]) for ratio, element in contrasts[kind] if ratio < least] == []


def test_the_switch_turns_light_into_dark_and_back(opened):
    tab = opened("small", scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = [tab.evaluate(ground)]
    for _ in range(2):
        tab.locator("#scheme").click()
        seen.append(tab.evaluate(ground))
    assert seen[0] == seen[2] != seen[1]


def test_text_is_large_enough_on_a_phone(opened):
    tab = opened("small", width=390)
    unfold(tab)
    sizes = """() => [...document.querySelectorAll("main p, main li, main dd, main td, main th")]
      .filter((element) => element.checkVisibility())
      .map((element) => parseFloat(getComputedStyle(element).fontSize))"""
    assert min(tab.evaluate(sizes)) >= 14


def columns(tab, number: int) -> list[str]:
    rows = tab.locator("#table-demo_50 tbody tr").all()
    return [row.locator("th, td").nth(number).inner_text() for row in rows]


def test_a_click_sorts_numbers_by_value_and_leaves_empty_cells_last(opened):
    tab = opened("small")
    heading = tab.locator("#table-demo_50 th[data-column='3']")
    before = columns(tab, 3)
    states = []
    for key in (False, True, False):
        heading.locator("button").press("Enter") if key else heading.locator("button").click()
        states.append((heading.get_attribute("aria-sort"), columns(tab, 3)))
    values = ["9.2 ± 1.5", "61.5 ± 2.4", "90.0 ± 1.5", "98.0 ± 0.7", "99.5 ± 0.4*", "100.0 ± 0.0*"]
    assert states[0] == ("ascending", [*values, "failed", "missing"])
    assert states[1] == ("descending", [*reversed(values), "failed", "missing"])
    assert states[2] == ("none", before)


def test_names_sort_by_the_alphabet_and_one_heading_at_a_time(opened):
    tab = opened("small")
    tab.locator("#table-demo_50 th[data-column='3'] button").click()
    tab.locator("#table-demo_50 th[data-column='0'] button").click()
    assert columns(tab, 0) == sorted(columns(tab, 0), key=lambda name: name.replace("<", "").replace("+", ""))
    assert columns(tab, 0)[0].startswith("A ") and BOTH in columns(tab, 0)[:2]
    assert tab.locator("#table-demo_50 th[data-column='3']").get_attribute("aria-sort") == "none"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_seen_is_not_blank(opened, width, scheme):
    tab = opened("small", width, scheme)
    for place in ("summary", "pareto", "demo_50", "sensitivities"):
        tab.evaluate(f"document.getElementById('{place}').scrollIntoView()")
        pixels = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
        counts = sorted(pixels.getcolors(maxcolors=pixels.width * pixels.height))
        num_ground, ground = counts[-1]
        assert len(counts) > 50, place
        assert 0.02 < 1 - num_ground / (pixels.width * pixels.height) < 0.95, place
        assert (min(ground) > 128) == (scheme == "light")
