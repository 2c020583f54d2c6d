"""The pages agree with each other and with the tree."""

import re
import runpy

import pytest

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


@pytest.mark.parametrize("page", [*PAGES, "docs/data_flow.svg"])
def test_sources_that_a_page_names_are_there(page):
    example = {"facts/estimators/methods/diagonal.py", "conf/estimator/diagonal.yaml"}  # made by docs/extending.md
    named = {name.rstrip(".,") for name in SOURCE.findall((ROOT / page).read_text())} - example
    named = {name for name in named if "NAME" not in name and "{" not in name}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_tree_shows_every_folder():
    """`docs/architecture.md` begins with it, one line each."""
    tree = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    shown = re.findall(r"^  (\w+/|\w+\.py)", tree, re.MULTILINE)
    folders = [f"{path.name}/" for root in ("facts", "experiments") for path in sorted((ROOT / root).iterdir()) if path.is_dir()]
    assert sorted(name for name in shown if name.endswith("/")) == sorted(set(folders) - {"__pycache__/"})


def test_the_tables_of_methods_are_what_the_docstrings_give():
    maker = runpy.run_path(str(ROOT / "docs/make_tables.py"))
    text = maker["PAGE"].read_text()
    assert text == maker["render"](text), "docstrings have changed: make docs"
