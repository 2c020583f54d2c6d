"""The pages agree with each other and with the tree, and public names say what they are."""

import inspect
import re
import runpy
from importlib import import_module
from inspect import signature
from operator import attrgetter

import pytest

import facts
from tests.docs.pages import PAGES, ROOT

SOURCE = re.compile(r"(?<![\w/.-])((?:facts|experiments|conf|tests)/[\w/.{},-]*)")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())
    for target in targets:
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        file = folder / path if path else ROOT / page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("page", PAGES)
def test_sources_that_a_page_names_are_there(page):
    example = {"facts/estimators/methods/diagonal.py", "conf/estimator/diagonal.yaml"}  # made by docs/extending.md
    named = {name.rstrip(".,") for name in SOURCE.findall((ROOT / page).read_text())} - example
    named = {name for name in named if "NAME" not in name and "{" not in name}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_tree_shows_every_folder():
    """And every file of `experiments`: `docs/architecture.md` begins with it, one line each."""
    tree = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    parts = re.split(r"^(\w+/)$", tree, flags=re.MULTILINE)[1:]
    for root, lines in zip(parts[::2], parts[1::2], strict=True):
        shown = re.findall(r"^  (\S+)", lines, re.MULTILINE)
        folders = {f"{path.parent.name}/" for path in (ROOT / root).glob("*/*") if path.parent.name != "__pycache__"}
        files = {path.name for path in (ROOT / root).glob("*.py")} - {"__init__.py"}
        assert sorted(shown) == sorted(folders | files)


@pytest.mark.parametrize("page", PAGES)
def test_names_that_a_page_imports_are_there(page):
    code = "".join(re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))
    imports = re.findall(r"^ *from (facts[\w.]*) import (.+)$", code, re.MULTILINE)
    uses = re.findall(r"(?<![\w.\"-])facts\.((?:search\.)?[A-Za-z]\w*)(?=\()", code)
    for module, names in imports:
        if module.startswith("facts.tasks.dense"):
            pytest.importorskip("mmdet", reason="the extra `detection` is not installed: make install-detection")
        for name in names.split(", "):
            assert hasattr(import_module(module), name), f"{module}.{name}"
    for name in uses:
        assert attrgetter(name)(facts), name


def test_every_public_name_says_what_it_is():
    """`test_site.py` finds each name on the page."""
    pytest.importorskip("griffe", reason="the extra `docs` is not installed: pip install -e '.[docs]'")
    for package, names in runpy.run_path(str(ROOT / "docs/public_names.py"))["public_names"]():
        for name in names:
            docstring = inspect.cleandoc(getattr(import_module(package), name).__doc__ or "")
            assert docstring.endswith((".", ":", "`")), f"{package}.{name} has no docstring of sentences"


def test_names_are_those_of_the_stub_and_can_be_imported():
    for name in ("Budget", "Execution", "compress", "prepare", "pareto", "recover", "search", "estimators"):
        assert name in facts.__all__
    assert facts.Calibration is facts.PreparedModel  # its former name
    for name in {*facts.__all__} - {"Calibration"}:
        assert getattr(facts, name).__name__.rpartition(".")[2] == name


def test_the_arguments_of_compress_fit_on_a_screen():
    arguments = signature(facts.compress).parameters
    assert len(arguments) <= 15
    assert all(f"| `{name}` |" in facts.compress.__doc__ for name in arguments)
