"""The README does what it says."""

import re
import subprocess
from io import StringIO

import pandas as pd
import pytest

from tests.docs.readme import README, ROOT, run, write_files

# What a reader would look at, before and after.
BEFORE = """
torch.save((images, result.model.eval()(images)), "seen.pt")
torch.save(model.state_dict(), "dense.pt")
before, after = result.summary.before, result.summary.after
assert after.flops < 0.6 * before.flops and after.params < 0.6 * before.params
"""
AFTER = """
import torch

images, outputs = torch.load("seen.pt")
assert torch.equal(model(images), outputs)
"""


def test_a_network_is_compressed_saved_and_loaded_in_another_process(tmp_path):
    write_files("Compress your own network", tmp_path)
    for name, look in (("compress_mine.py", BEFORE), ("load_mine.py", AFTER)):
        with open(tmp_path / name, "a") as file:
            file.write(look)
    printed = run("python compress_mine.py", tmp_path)
    assert "FLOPs" in printed and "48 layers low-rank" in printed
    run("python load_mine.py", tmp_path)
    saved = sum(path.stat().st_size for path in (tmp_path / "smaller").iterdir())
    assert saved < 0.6 * (tmp_path / "dense.pt").stat().st_size


def test_methods_from_outside_the_package_appear_in_a_table(tmp_path):
    sweep, table = write_files("Add a method of your own", tmp_path)
    run(sweep, tmp_path)
    records = sorted((tmp_path / "results/mini/records").glob("*.json"))
    assert len(records) == 4
    stamps = [path.stat().st_mtime_ns for path in records]

    printed = run(table, tmp_path)
    assert sorted((tmp_path / "results/mini/records").glob("*.json")) == records
    assert [path.stat().st_mtime_ns for path in records] == stamps, "a cell of the sweep was run again"
    figures = pd.read_csv(tmp_path / "results/mini/tables/my_table.csv").query("metric == 'top1'").set_index("row")
    assert figures.status.eq("done").all() and figures.ours.gt(50).all()
    assert list(figures.index) == ["FACTS", "Diagonal", "FACTS, equal energy", "Diagonal, equal energy"]
    assert figures.ours.nunique() == 4, "every method gives a network of its own"
    assert all(row in printed for row in figures.index)


def shown(name: str) -> pd.DataFrame:
    """A table of the README, by its mark."""
    lines = README.partition(f"<!-- numbers: {name} -->\n")[2].partition("\n\n")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return pd.DataFrame(rows, columns=header)


def committed(path: str) -> pd.DataFrame:
    """A table as it was committed: runs on this machine write figures of their own there."""
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip(f"no commit to read {path} from")
    return pd.read_csv(StringIO(shown.stdout))


def test_the_first_tables_hold_the_figures_of_the_files():
    written = committed("results/mini/tables/classification_50.csv").query("metric == 'top1'")
    written = written.pivot(index="row", columns="column", values="ours").map("{:.1f}".format)
    table = shown("mini").set_index("top-1")
    assert len(table) == 5 and table.equals(written.loc[table.index, table.columns].rename_axis(columns=None))

    by_estimator = committed("results/vit_tiny/fisher_estimators.csv").set_index("method").top1
    searches = committed("results/vit_tiny/searches.csv").query("ratio == 0.8")
    by_search = searches.set_index("FACTS + " + searches.search).top1
    figures = pd.concat([by_estimator, by_search]).map("{:.1f}".format)
    assert shown("vit_tiny").iloc[0].to_dict() == figures[shown("vit_tiny").columns].to_dict()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
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
