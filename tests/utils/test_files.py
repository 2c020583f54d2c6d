"""Locks: one holder at a time, whatever becomes of it. Files that refer to others: never to those of another."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from facts.utils.files import HeldElsewhere, locked, replacing, writable_folder

HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_keeps_others_out_and_falls_with_a_killed_holder(tmp_path):
    path = tmp_path / "cell.lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(HeldElsewhere, match=r"cell\.lock is held by another process"), locked(path, wait=False):
            pytest.fail("two holders")
        holder.kill()
    with locked(path, wait=False):
        assert path.exists()


def test_a_file_system_without_locks_is_one_clear_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="on a file system with flock"), locked(tmp_path / "lock"):
        pytest.fail("no lock, and yet inside")


def test_a_folder_is_tried_without_leaving_one(tmp_path):
    assert writable_folder(tmp_path / "a" / "b", keep=False) == tmp_path / "a" / "b" and not any(tmp_path.iterdir())
    writable_folder(tmp_path / "a")
    writable_folder(tmp_path / "a" / "b", keep=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_a_folder_may_be_called_like_the_home_of_a_user_who_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert writable_folder(Path("~nobody-at-all/a")).is_dir() and (tmp_path / "~nobody-at-all" / "a").is_dir()


def write(path, text):
    """A file, and another one that it refers to, where `replacing` says."""
    with replacing(path) as staged:
        staged.write_text(text)
        staged.with_suffix(".data").write_text(text)


def contents(folder):
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_staged_files_move_together_or_not_at_all(tmp_path):
    folder = tmp_path / "folder"
    for text in ("first", "second"):
        write(folder / "a.onnx", text)
        assert contents(folder) == {"a.onnx": text, "a.data": text}
    with pytest.raises(ZeroDivisionError), replacing(folder / "a.onnx") as staged:
        staged.write_text("third")
        1 / 0  # noqa: B018
    assert contents(folder) == {"a.onnx": "second", "a.data": "second"}
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "new" / "folder" / "a.onnx"):
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_move_that_ends_in_between_mixes_no_files(tmp_path, monkeypatch):
    write(tmp_path / "a.onnx", "first")
    move = Path.replace

    def moves_only_data(file, to):
        if file.suffix == ".onnx":
            raise KeyboardInterrupt
        return move(file, to)

    monkeypatch.setattr(Path, "replace", moves_only_data)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.onnx", "second")
    assert contents(tmp_path) == {"a.data": "second"}
