"""Workflows and the container: what they run exists."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w$()/.-]+):", (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv"), re.MULTILINE))


def commands(path: Path) -> list[str]:
    if path.suffix != ".yml":
        return re.findall(r"^(?:RUN|CMD) (.+)$", path.read_text(), re.MULTILINE)
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / "Containerfile"], ids=lambda path: path.name)
def test_every_target_and_script_exists(path):
    found = " ".join(commands(path)).replace('["make", "', "make ")
    targets, scripts = re.findall(r"\bmake ([\w./-]+)", found), re.findall(r"(?<!\S)\.ci/\w+", found)
    assert targets or scripts
    assert set(targets) <= TARGETS
    assert all((ROOT / script).is_file() for script in scripts)


def test_every_python_that_the_package_names_is_checked():
    (matrix,) = (job["strategy"]["matrix"] for job in yaml.safe_load(WORKFLOWS[0].read_text())["jobs"].values())
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert matrix["python"] == named
