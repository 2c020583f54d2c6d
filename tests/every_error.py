"""Whether some test meets every error: `python -m tests.every_error`, after `make test` with all extras.

Lists each `raise` of the package that was never executed, and fails where there is one.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from coverage import Coverage, CoverageData

from experiments.extras import missing_packages

SOURCES = ("facts", "experiments")
# By file and a part of its text, why coverage cannot see an error.
ALLOWED = {
    (
        "facts/utils/distributed.py",
        "lost the others",
    ): "torchrun ends the process before what it executed is written down",
}
# Files whose tests are skipped where an extra is not installed.
OF_EXTRAS = {
    "detection": (
        "facts/models/openmmlab.py",
        "facts/models/transplant.py",
        "facts/tasks/dense/ade20k.py",
        "facts/tasks/dense/coco.py",
        "facts/tasks/dense/base.py",
    ),
}


def raises(path: Path) -> Iterator[ast.Raise]:
    """Where a file raises an error; `raise` alone hands on what was raised elsewhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node


def never_raised(paths: Iterable[Path], data: CoverageData) -> Iterator[tuple[Path, ast.Raise]]:
    """Each `raise` of the files that was not executed."""
    for path in paths:
        executed = set(data.lines(str(path.resolve())) or ())
        for node in raises(path):
            if executed.isdisjoint(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
                yield path, node


def is_allowed(path: Path, node: ast.Raise) -> bool:
    text = ast.unparse(node)
    return any(str(path) == file and part in text for file, part in ALLOWED)


def main() -> None:
    coverage = Coverage()
    coverage.load()
    skipped = {file for extra, files in OF_EXTRAS.items() if missing_packages(extra) for file in files}
    paths = [path for source in SOURCES for path in sorted(Path(source).rglob("*.py")) if str(path) not in skipped]
    found = [entry for entry in never_raised(paths, coverage.get_data()) if not is_allowed(*entry)]
    for path, node in found:
        print(f"{path}:{node.lineno}: {ast.unparse(node)}")
    if found:
        raise SystemExit(f"no test meets these {len(found)} errors")


if __name__ == "__main__":
    main()
