"""The names of the package, each of which is imported when it is first asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import facts

SUBMODULES = {"analysis", "estimators", "finetuning", "models", "moments", "pruning", "search", "tasks"}


def names_for_type_checkers():
    (block,) = (node for node in ast.parse(Path(facts.__file__).read_text()).body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    return {alias.asname: node.module for node in block.body for alias in node.names}


def test_type_checkers_are_told_the_names_that_there_are():
    names = names_for_type_checkers()
    assert names.keys() == set(facts.__all__) - SUBMODULES
    for name, module in names.items():
        __import__(module)
        assert getattr(facts, name) is getattr(sys.modules[module], name)


def test_submodules_are_there():
    assert set(facts.__all__) >= SUBMODULES
    for name in SUBMODULES:
        assert getattr(facts, name).__name__ == f"facts.{name}"


@pytest.mark.system
def test_importing_the_package_does_not_import_pytorch():
    code = "import sys, facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
