"""Files and commands of the pages, as a reader would copy them: the fenced blocks behind a comment that marks them."""

import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT, ROOT / "docs", ROOT / "examples")
maker = runpy.run_path(str(ROOT / "docs/make_tables.py"))
PAGES = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in folder.glob("*.md")]
BLOCK = re.compile(r"^<!-- (?:file: (?P<file>\S+)|(?P<kind>\w+)) -->\n```\w+\n(?P<text>.*?)^```$", re.M | re.S)


def section_of(page: str, heading: str) -> str:
    """The text under a heading of second rank."""
    parts = re.split(r"^## ", (ROOT / page).read_text(), flags=re.MULTILINE)
    return next(part for part in parts if part.partition("\n")[0] == heading)


def write_files(section: str, folder: Path) -> None:
    for block in BLOCK.finditer(section):
        if block["file"]:
            path = folder / block["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block["text"])


def marked(section: str, kind: str) -> str:
    """The text of the block with a mark, such as `run` for commands."""
    return next(block["text"] for block in BLOCK.finditer(section) if block["kind"] == kind)


def run(command: str, folder: Path, **environment: str) -> str:
    """Run a command in a shell in which `python` is this one, and return what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"shell": True, "cwd": folder, "env": {**os.environ, "PATH": path, **environment}}
    done = subprocess.run(command, capture_output=True, text=True, **own)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@cache
def committed(path: str) -> str:
    """A file as it was committed: runs on this machine write their own numbers into `results/`."""
    if not (ROOT / ".git").exists():
        return (ROOT / path).read_text()
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        raise FileNotFoundError(path)
    return shown.stdout
