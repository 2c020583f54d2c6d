"""Hashes of the package's own code, so that results of other versions are never taken for its own."""

import ast
import inspect
from functools import cache
from pathlib import Path

from facts.utils.cache import content_key

PACKAGE = Path(__file__).parents[1]
# No result depends on these.
WITHOUT_RESULTS = ("__main__.py", "cli", "saving")
# Each file holds one method, and affects only that one.
METHODS = "methods"


@cache
def shared_code() -> str:
    """Hash of the code that every result may depend on."""
    paths = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    shared = [path for path in paths if path.parts[0] not in WITHOUT_RESULTS and METHODS not in path.parts]
    return content_key({str(path): statements(PACKAGE / path) for path in shared})


@cache
def code_of(cls: type) -> str:
    """Hash of the file that defines a class; empty if it was typed into a session."""
    try:
        return content_key(statements(Path(inspect.getfile(cls))))
    except (OSError, TypeError):
        return ""


@cache
def statements(path: Path) -> str:
    """Code of a file, without comments and docstrings."""
    tree = ast.parse(path.read_bytes())  # in UTF-8, whatever the locale
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
