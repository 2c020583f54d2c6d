"""The site of the pages: whole, without anything from elsewhere, and fit to be read in a browser, from files."""

import re
import runpy
from html.parser import HTMLParser
from importlib import import_module
from inspect import cleandoc
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, run

pytestmark = pytest.mark.system
NEVER_MADE = ("Estimator",)  # classes whose constructors nobody calls

for module in ("material", "mkdocstrings_handlers.python"):
    pytest.importorskip(module, reason="the extra `docs` is not installed: pip install -e '.[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    run(f"python -m mkdocs build --strict --site-dir {folder}", ROOT)
    return folder


class References(HTMLParser):
    """Files that a page loads, and the places in it to which a link may lead."""

    def __init__(self, path: Path):
        super().__init__()
        self.loaded, self.places = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.loaded += [found[name] for name in ("src", "srcset", "data", "poster") if found.get(name)]
        if "href" in found and tag in ("link", "use", "image"):
            self.loaded.append(found["href"])
        self.places.add(found.get("id"))


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, References]:
    """All but the one of a server, whose links begin at the server's root."""
    return {path: References(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_pages_load_nothing_from_elsewhere(site, pages):
    for path, page in pages.items():
        for target in page.loaded:
            assert target.startswith("data:") or (path.parent / target).is_file(), f"{path.relative_to(site)}: {target}"
    assert len(pages) > 50
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text()), path


def test_every_public_name_says_what_it_is_and_has_a_place_and_a_signature(site, pages):
    page = site / "docs/api.html"
    text = re.sub(r"<[^>]+>", "", page.read_text())
    for package, names in runpy.run_path(str(ROOT / "docs/public_names.py"))["public_names"]():
        for name in names:
            docstring = cleandoc(getattr(import_module(package), name).__doc__ or "")
            assert docstring.endswith((".", ":", "`")), f"{package}.{name} has no docstring of sentences"
            assert f"{package}.{name}" in pages[page].places
            assert re.search(rf"^\s*{name}\(", text, re.MULTILINE) or name in NEVER_MADE, f"{package}.{name}"
    assert re.search(r"^FACTS\(\s+\*,\s+shrinkage_row: Share \| None = None,", text, re.MULTILINE), "inherited options"
