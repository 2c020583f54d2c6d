"""The page of public names."""

import inspect
import runpy
from importlib import import_module

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("griffe2md", reason="the page is made by griffe2md: pip install -e '.[test]'")
MAKER = runpy.run_path(str(ROOT / "docs/make_api.py"))
NAMES = [f"{package}.{name}" for package, names in MAKER["public_names"]() for name in names]


def test_the_page_is_what_the_docstrings_give():
    assert MAKER["PAGE"].read_text() == MAKER["render"](), "docstrings have changed: make docs"


@pytest.mark.parametrize("path", NAMES)
def test_every_public_name_says_what_it_is(path):
    package, _, name = path.rpartition(".")
    thing = getattr(import_module(package), name)
    assert inspect.cleandoc(thing.__doc__ or "").endswith((".", ":", "`")), f"{path} has no docstring of sentences"
    assert f"### `{path}`" in MAKER["PAGE"].read_text()
