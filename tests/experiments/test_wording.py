"""Errors of the library, in the words of a configuration."""

import ast
import errno
from pathlib import Path

import pytest

import facts
from experiments.wording import FIELDS, in_fields

TEXTS = [
    "".join(part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))
    if isinstance(node, ast.JoinedStr)
    else node.value
    for path in Path(facts.__file__).parent.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
]


@pytest.mark.parametrize("words", FIELDS)
def test_the_library_has_each_of_the_words(words):
    assert any(words in text for text in TEXTS)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError('give MemoryPolicy(moments="host")'), "give hardware.memory.moments=host"),
        (ValueError("Set root to a folder"), "Set task.mini.root to a folder"),
        (
            OSError(errno.ENOSPC, "on another disk (for results, for the cache, TMPDIR for temporary files)"),
            r"\[Errno 28\] on another disk \(results=, TMPDIR for temporary files\)",
        ),
        (KeyError("nothing to reword"), "nothing to reword"),
    ],
)
def test_errors_name_fields_and_keep_their_kind(error, text):
    with pytest.raises(type(error), match=text), in_fields("mini"):
        raise error
