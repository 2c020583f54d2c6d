"""The site of the pages: whole, without anything from elsewhere, and fit to be read in a browser, from files."""

import re
import runpy
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, run

pytestmark = pytest.mark.system

for module in ("material", "mkdocstrings_handlers.python"):
    pytest.importorskip(module, reason="the extra `docs` is not installed: pip install -e '.[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    run(f"python -m mkdocs build --strict --site-dir {folder}", ROOT)
    return folder


class References(HTMLParser):
    """What a page loads, where its links lead, and the places in it to which a link may lead."""

    def __init__(self, path: Path):
        super().__init__()
        self.loaded, self.links, self.places, self.images = [], [], set(), {}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.loaded += [found[name] for name in ("src", "srcset", "data", "poster") if found.get(name)]
        if "href" in found:
            (self.loaded if tag in ("link", "use", "image") else self.links).append(found["href"])
        if tag == "img":
            self.images[found["src"]] = found.get("alt")
        self.places.add(found.get("id"))


NEVER_MADE = ("Estimator",)  # classes whose constructors nobody calls


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, References]:
    """All but the one of a server, whose links begin at the server's root."""
    return {path: References(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_of_the_repository_is_in_its_place(site):
    for page in PAGES:
        assert (site / page.replace("README.md", "index.md")).with_suffix(".html").exists(), page


def test_pages_load_nothing_from_elsewhere(site, pages):
    for path, page in pages.items():
        for target in page.loaded:
            assert target.startswith("data:") or (path.parent / target).is_file(), f"{path.relative_to(site)}: {target}"
    assert len(pages) > 50
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text()), path


def test_links_lead_to_files_and_places(site, pages):
    """Those of the theme and of signatures too; `--strict` looks at those of the pages."""
    num_places = 0
    for path, page in pages.items():
        for link in page.links:
            if link.startswith(("https://", "http://")):
                continue
            file, _, place = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            assert target.exists(), f"{path.relative_to(site)}: {link}"
            if place:
                assert place in pages[target].places, f"{path.relative_to(site)}: {link}"
                num_places += 1
    assert num_places > 500


def test_every_public_name_has_a_place_and_a_signature(site, pages):
    page = site / "docs/api.html"
    text = re.sub(r"<[^>]+>", "", page.read_text())
    for package, names in runpy.run_path(str(ROOT / "docs/public_names.py"))["public_names"]():
        for name in names:
            assert f"{package}.{name}" in pages[page].places
            assert re.search(rf"^\s*{name}\(", text, re.MULTILINE) or name in NEVER_MADE, f"{package}.{name}"
    assert re.search(r"^FACTS\(\s+\*,\s+shrinkage_row: Share \| None = None,", text, re.MULTILINE), "inherited options"


def test_every_figure_is_shown_with_its_caption(site, pages):
    shown = pages[site / "docs/figures.html"].images
    drawn = [path for pattern in ("mini/figures/*.png", "photos/*/*.png") for path in (ROOT / "results").glob(pattern)]
    assert sorted(shown) == sorted(f"../{path.relative_to(ROOT)}" for path in drawn)
    assert all(len(caption) > 20 for caption in shown.values())
