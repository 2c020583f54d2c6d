"""The pages agree with each other and with the tree, and public names say what they are."""

import re
from importlib import import_module
from inspect import signature
from operator import attrgetter

import pytest

import facts
from tests.docs.pages import PAGES, ROOT

SOURCE = re.compile(r"(?<![\w/.-])((?:facts|experiments|conf|tests)/[\w/.{},-]*)")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\((?!https://)([^)\s]+)\)", (ROOT / page).read_text()):
        path, _, heading = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("page", PAGES)
def test_sources_that_a_page_names_are_there(page):
    example = {"facts/estimators/methods/diagonal.py", "conf/estimator/diagonal.yaml"}  # made by docs/extending.md
    named = {name.rstrip(".,") for name in SOURCE.findall((ROOT / page).read_text()) if not re.search("NAME|{", name)}
    assert [name for name in sorted(named - example) if not (ROOT / name).exists()] == []


def test_the_tree_shows_every_folder():
    """And every file of `experiments`: `docs/architecture.md` begins with it, one line each."""
    tree = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    parts = re.split(r"^(\w+/)$", tree, flags=re.MULTILINE)[1:]
    for root, lines in zip(parts[::2], parts[1::2], strict=True):
        folders = {f"{path.parent.name}/" for path in (ROOT / root).glob("*/*") if path.parent.name != "__pycache__"}
        files = {path.name for path in (ROOT / root).glob("*.py")} - {"__init__.py"}
        assert sorted(re.findall(r"^  (\S+)", lines, re.MULTILINE)) == sorted(folders | files)


@pytest.mark.parametrize("page", PAGES)
def test_names_that_a_page_imports_are_there(page):
    code = "".join(re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))
    for module, names in re.findall(r"^ *from (facts[\w.]*) import (.+)$", code, re.MULTILINE):
        if module.startswith("facts.tasks.dense"):
            pytest.importorskip("mmdet", reason="the extra `detection` is not installed: make install-detection")
        for name in names.split(", "):
            assert hasattr(import_module(module), name), f"{module}.{name}"
    for name in re.findall(r"(?<![\w.\"-])facts\.((?:search\.)?[A-Za-z]\w*)(?=\()", code):
        assert attrgetter(name)(facts), name


def test_names_are_those_of_the_stub_and_can_be_imported():
    known = {"Budget", "Execution", "compress", "prepare", "pareto", "recover", "search", "estimators"}
    assert known < {*facts.__all__}
    assert facts.Calibration is facts.PreparedModel  # its former name
    for name in {*facts.__all__} - {"Calibration"}:
        assert getattr(facts, name).__name__.rpartition(".")[2] == name


def test_the_arguments_of_compress_fit_on_a_screen():
    arguments = signature(facts.compress).parameters
    assert len(arguments) <= 15 and all(f"| `{name}` |" in facts.compress.__doc__ for name in arguments)
