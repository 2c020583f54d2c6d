"""Hashes of code: comments do not count, statements do."""

import importlib.util
import sys

from facts.estimators import FACTS, GFWSVD
from facts.moments import InputGram
from facts.utils.sources import PACKAGE, code_of, shared_code, statements


def test_comments_and_docstrings_do_not_count_but_statements_do(tmp_path):
    def code(text):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"  # a file is read once
        path.write_text(text)
        return statements(path)

    assert code("def f(x): return x + 1") != code("def f(x=0): return x + 1")
    assert code('"""One."""\n\n\ndef f(x):\n    """Add."""\n    return x + 1  # more\n') == code("def f(x): return x+1")


def test_a_moment_of_another_code_is_kept_apart(tmp_path):
    """Of the same name and fields, whether one's own changed or one is called as the package's is."""
    spec = "from facts.moments import InputGram as Base\n\n\nclass InputGram(Base):\n    size = {}\n"
    keys = {InputGram().key}
    for number in range(2):
        path = tmp_path / f"mine_{number}.py"
        path.write_text(spec.format(number))
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(path.stem, path))
        sys.modules[path.stem] = module
        module.__spec__.loader.exec_module(module)
        keys.add(module.InputGram().key)
        del sys.modules[path.stem]
    assert len(keys) == 3 and all(key.startswith("InputGram-") for key in keys)


def test_each_method_has_its_own_hash_and_no_part_in_the_shared_one(monkeypatch):
    assert code_of(FACTS) != code_of(GFWSVD)
    read = []
    monkeypatch.setattr("facts.utils.sources.statements", lambda path: read.append(path.relative_to(PACKAGE)) or "")
    shared_code.__wrapped__()
    assert len(read) > 50
    assert not [path for path in read if "methods" in path.parts or path.parts[0] in ("cli", "saving")]
