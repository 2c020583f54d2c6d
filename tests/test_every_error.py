"""The check that tests meet every error."""

import importlib.util

import pytest
from coverage import Coverage

from tests.every_error import never_raised

SOURCE = """
def refuse(value):
    if value == 1:
        raise ValueError(
            "one"
        )
    if value == 2:
        raise ValueError("two") from None
    try:
        int(value)
    except TypeError:
        raise
"""


def test_an_error_that_was_never_raised_is_found(tmp_path):
    path = tmp_path / "refusing.py"
    path.write_text(SOURCE)
    coverage = Coverage(data_file=None, include=[str(path)], config_file=False)
    with coverage.collect():
        spec = importlib.util.spec_from_file_location("refusing", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.refuse(3)
        with pytest.raises(ValueError, match="one"):
            module.refuse(1)
    [(found, node)] = never_raised([path], coverage.get_data())
    assert (found, node.lineno) == (path, 8)
