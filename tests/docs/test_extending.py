"""The guide's script runs, and methods are added as docs/extending.md says."""

import json
import runpy
import shlex
import shutil
import sys

import pandas as pd
import pytest

import experiments.reproduce
import experiments.run
from tests.docs.pages import ROOT, marked, run, section_of, write_files

pytestmark = pytest.mark.system

# What a reader would look at, before and after.
BEFORE = """
torch.save((images, result.model.eval()(images)), "seen.pt")
before, after = result.summary.before, result.summary.after
assert after.flops < 0.6 * before.flops and after.params < 0.7 * before.params
"""
AFTER = """
import torch

images, outputs = torch.load("seen.pt")
assert torch.equal(model(images), outputs)
"""


def test_a_network_is_compressed_saved_and_loaded_in_another_process(tmp_path, monkeypatch, capsys):
    """A smaller one than the guide's, for time."""
    write_files(section_of("docs/guide.md", "A complete script"), tmp_path)
    for name, look in (("compress_mine.py", BEFORE), ("load_mine.py", AFTER)):
        text = (tmp_path / name).read_text().replace("vit_tiny_patch16_224", "test_vit").replace("224", "160")
        (tmp_path / name).write_text(text + look)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("compress_mine.py")
    printed = capsys.readouterr().out
    assert "FLOPs" in printed and "blocks with fewer tokens (tokens" in printed
    run("python load_mine.py", tmp_path)


def test_methods_from_outside_the_package_appear_in_a_table(tmp_path, monkeypatch, capsys):
    """The commands run in this process, which has imported the package."""
    section = section_of("docs/extending.md", "Outside the package")
    write_files(section, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("experiments.reproduction.report_on_all", lambda folder: None)

    def run_here(line: str, main, *more: str) -> None:
        python, option, module, *arguments = shlex.split(line)
        assert (python, option, module) == ("python", "-m", main.__module__)
        own = ["task.mini.num_calibration=256", "tracking=off", "hydra/job_logging=none", "hydra/hydra_logging=none"]
        monkeypatch.setattr(sys, "argv", [module, *arguments, *own, *more])
        main()

    sweep, table = marked(section, "run").replace("\\\n", "").splitlines()
    run_here(sweep, experiments.run.main)
    records = sorted((tmp_path / "results/mini/records").glob("*.json"))
    assert len(records) == 4
    stamps = [path.stat().st_mtime_ns for path in records]
    run_here(table, experiments.reproduce.main, "workers=1")
    printed = capsys.readouterr().out
    assert sorted((tmp_path / "results/mini/records").glob("*.json")) == records
    assert [path.stat().st_mtime_ns for path in records] == stamps, "a cell of the sweep was run again"
    top1 = pd.read_csv(tmp_path / "results/mini/tables/my_table.csv").query("metric == 'top1'").set_index("row")
    assert top1.status.eq("done").all() and top1.ours.gt(50).all()
    assert list(top1.index) == ["FACTS", "Diagonal", "FACTS, equal energy", "Diagonal, equal energy"]
    outcomes = {json.loads(path.read_text())["outcomes"]["top1"] for path in records}
    assert len(outcomes) == 4, "every method gives a network of its own"
    assert all(row in printed for row in top1.index)


def test_an_estimator_inside_the_package_has_five_parts(tmp_path):
    """In a copy of the package: it is found by name, by the command line, by the page of methods and by the tests."""
    for name in ("facts", "conf", "experiments", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "checkpoints"))
    (tmp_path / "experiments/mini/checkpoints").symlink_to(ROOT / "experiments/mini/checkpoints")
    (tmp_path / "docs").mkdir()
    for name in ("pyproject.toml", "docs/make_tables.py", "docs/measurements.py", "docs/methods.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    section = section_of("docs/extending.md", "Inside the package")
    write_files(section, tmp_path)
    oracles, table = tmp_path / "tests/oracles/factors.py", "ORACLES = {\n"
    before, after = oracles.read_text().split(table)
    assert '`"diagonal": diagonal,`' in section
    oracles.write_text(f'{before}{marked(section, "oracle")}\n\n{table}    "diagonal": diagonal,\n{after}')
    here = {"PYTHONPATH": str(tmp_path)}
    run("python docs/make_tables.py", tmp_path, **here)
    methods = (tmp_path / "docs/methods.md").read_text()
    assert "| `diagonal` | the diagonals of KFAC's factors | Σ x xᵀ, on the diagonal |" in methods
    assert "diagonal: the diagonals of KFAC's factors" in run("facts compress --help", tmp_path, **here, COLUMNS="200")
    chosen = "swin-diagonal or every_estimator_and_search or files_say"
    files = "tests/estimators/test_against_brute_force.py tests/experiments/test_config.py"
    tested = run(f"python -m pytest -vv -p no:cacheprovider {files} -k '{chosen}'", tmp_path, **here)
    for name in (
        "test_factors_through_a_network[swin-diagonal]",  # against the oracle
        "test_every_estimator_and_search_has_a_file_and_a_name",
        "test_the_files_say_the_defaults_of_the_classes",
    ):
        assert name in tested
