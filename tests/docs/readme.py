"""The README's files and commands, as a reader would copy them: the fenced blocks behind a comment that marks them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^<!-- (?:file: (?P<file>\S+)|run) -->\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def sections() -> dict[str, str]:
    """The text under each heading of second rank."""
    return {part.partition("\n")[0]: part for part in re.split(r"^## ", README, flags=re.MULTILINE)}


def write_files(section: str, folder: Path) -> list[str]:
    """Write a section's files into a folder; the commands that it tells to run, one a line."""
    commands = []
    for block in BLOCK.finditer(sections()[section]):
        if block["file"]:
            path = folder / block["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block["text"])
        else:
            commands += block["text"].splitlines()
    return commands


def run(command: str, folder: Path) -> str:
    """What a command prints in a shell of its own, where `python` is this one."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
