"""The tables of what tests need, and of attacks."""

import itertools
from pathlib import Path

import pytest

from tests.attacks.where import ATTACKS
from tests.needs import NEEDS, needs_of


@pytest.mark.parametrize("beginning", [*itertools.chain(*NEEDS.values()), *ATTACKS])
def test_every_entry_is_the_beginning_of_a_test(beginning):
    place, *names = beginning.split("::")
    path = Path(__file__).parent / place
    assert path.exists()
    for name in names:
        assert f"class {name}" in path.read_text() or f"def {name}" in path.read_text()


def test_no_test_stands_in_the_table_twice():
    assert all(len(needs_of(f"tests/{beginning}")) == 1 for beginnings in NEEDS.values() for beginning in beginnings)


def test_other_tests_need_nothing():
    assert needs_of("tests/cost/test_count.py::test_published_gflops[Swin-B-dense]") == []
