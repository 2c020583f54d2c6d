"""The README does what it says."""

import runpy
import subprocess
from io import StringIO

import pandas as pd
import pytest

from tests.docs.pages import ROOT, run, section_of, write_files

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


@pytest.mark.system
def test_a_network_is_compressed_saved_and_loaded_in_another_process(tmp_path, monkeypatch, capsys):
    write_files(section_of("README.md", "Compress your own network"), tmp_path)
    for name, look in (("compress_mine.py", BEFORE), ("load_mine.py", AFTER)):
        with open(tmp_path / name, "a") as file:
            file.write(look)
    monkeypatch.chdir(tmp_path)
    summary = runpy.run_path("compress_mine.py")["result"].summary
    printed = capsys.readouterr().out
    assert "FLOPs" in printed and "blocks with fewer tokens (ranks" in printed
    run("python load_mine.py", tmp_path)
    assert summary.after.flops < 0.6 * summary.before.flops


def shown(name: str) -> pd.DataFrame:
    """A table of the README, by its mark."""
    table = (ROOT / "README.md").read_text().partition(f"<!-- numbers: {name} -->\n")[2].partition("\n\n")[0]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return pd.DataFrame(rows, columns=header)


def committed(path: str) -> pd.DataFrame:
    """A table as it was committed: runs on this machine write their own numbers there."""
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip(f"no commit to read {path} from")
    return pd.read_csv(StringIO(shown.stdout))


def test_the_table_of_photos_holds_the_numbers_of_the_file():
    tables = [committed(f"results/photos/tables/{name}.csv") for name in ("units", "tokens")]
    points = pd.concat(tables).query("metric == 'top1'").drop_duplicates(["row", "column"])
    points = points.set_index(["row", "column"]).ours
    methods = {
        "units and tokens": "Units and tokens: FACTS + CoRS-Fisher",
        "units": "Units: FACTS + CoRS-Fisher",
        "layers": "Layers, pivoted: FACTS + CoRS-Fisher",
    }
    table = shown("photos").set_index("top-1")
    assert len(table) == 6
    for row, written in table.iterrows():
        network, method = row.split(", ")
        columns = [f"{network}, {100 * float(ratio):.0f} %" for ratio in written.index[1:]]
        found = [points["Dense", columns[0]], *(points[methods[method], column] for column in columns)]
        assert list(written) == [f"{value:.1f}" for value in found]


def test_the_table_of_digits_holds_the_numbers_of_the_file():
    written = committed("results/mini/tables/classification_50.csv").query("metric == 'top1'")
    written = written.pivot(index="row", columns="column", values="ours").map("{:.1f}".format)
    table = shown("mini").set_index("top-1")
    assert len(table) == 5 and table.equals(written.loc[table.index, table.columns].rename_axis(columns=None))
