"""Progress bars: on a terminal alone, and on none of those that several processes share."""

import pytest

from facts.utils import progress
from facts.utils.progress import hide_progress, with_progress


@pytest.fixture(autouse=True)
def no_choice_of_the_environment(monkeypatch):
    monkeypatch.setattr(progress, "_hidden", False)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def shown(capsys) -> str:
    assert list(with_progress([1, 2, 3], "counting")) == [1, 2, 3]
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_nothing_is_written_where_there_is_no_terminal(capsys):
    assert shown(capsys) == ""


def test_a_terminal_shows_a_bar_until_it_is_hidden(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, this is a terminal
    monkeypatch.setenv("TERM", "xterm")
    assert "counting" in shown(capsys)
    hide_progress()
    assert shown(capsys) == ""
