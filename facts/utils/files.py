"""Atomic writing of files, first in a temporary folder and then moved; and file locks."""

import errno
import logging
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a stand-in for `path`, in a temporary folder next to it, which becomes `path` if the block succeeds.

    Other files there, to which the stand-in may refer, move along, before it. If the block fails, all are removed, and
    folders that this has created.
    Raises an `OSError` that says what to do if the folder cannot be written or the disk is full.
    """
    new = _missing(path.parent)
    folder = writable_folder(path.parent)
    path = folder / path.name
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file")
    with (
        without_empty(new),
        needing_room(path),
        tempfile.TemporaryDirectory(dir=folder, prefix=f".{path.name}.") as temporary,
    ):
        staged = Path(temporary) / path.name
        staged.touch()
        mode = staged.stat().st_mode
        yield staged
        others = [file for file in staged.parent.iterdir() if file != staged]
        for file in (*others, staged):
            file.chmod(mode)  # some writers make files that nobody else may read
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if others:
            path.unlink(missing_ok=True)  # an older one must not refer to newer files if this is interrupted
        for file in (*others, staged):
            file.replace(folder / file.name)


def _missing(folder: Path) -> list[Path]:
    """Folders that have to be created, the innermost first."""
    folder = at_home(folder)
    return [each for each in (folder, *folder.parents) if not each.exists()]


@contextmanager
def without_empty(folders: list[Path]) -> Iterator[None]:
    """Remove those of these folders that are empty if the block fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in folders:
                each.rmdir()
        raise


@contextmanager
def needing_room(path: Path) -> Iterator[None]:
    """Raises an `OSError` that says what to do if the disk is full while the block writes `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        in_text = re.search(r"os error (\d+)", str(error))  # safetensors gives the number nowhere else
        number = int(in_text[1]) if in_text else getattr(error, "errno", None)
        if number not in NO_ROOM:
            raise
        free = shutil.disk_usage(path.parent).free / 2**30
        raise OSError(
            number,
            f"no room for {path} ({os.strerror(number)}; {free:.2f} GiB are free there): free some, or choose a folder "
            "on another disk (for results, for the cache, TMPDIR for temporary files), and start again; what is "
            "finished is kept",
        ) from error


class ScratchFolder:
    """A temporary folder `path`, removed once nothing refers to this object."""

    def __init__(self):
        self.path = Path(tempfile.mkdtemp(prefix="facts-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def at_home(path: Path | str) -> Path:
    """Expand a leading `~` or `~user`; the name of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


def writable_folder(path: Path, keep: bool = True) -> Path:
    """Create `path` if necessary, `~` expanded. Raises an `OSError` that says what to do if it cannot be written.

    Unless `keep`, this is only tried: a folder that was created is removed again.
    """
    path = at_home(path)
    new = _missing(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(f"cannot write to the folder {path} ({error.strerror}); choose another one") from error
    for each in () if keep else new:
        each.rmdir()
    return path


class HeldElsewhere(Exception):
    """Another process holds a lock, and `wait` is false."""


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock file `path` for the block, against all processes and machines that share it.

    The lock is the kernel's `flock`, released however the process ends, also on NFS, CIFS and GPFS, and on Lustre and
    BeeGFS with user locks. The empty file stays, since removing it could let two processes in at once. Raises
    `HeldElsewhere` if `wait` is false and the lock is held, and `OSError` if the file system has no locks.
    """
    writable_folder(path.parent)
    # A soft lock instead would outlive a holder that was killed.
    lock = FileLock(path, fallback_to_soft=False, poll_interval=POLL_SECONDS)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            if not wait:
                raise HeldElsewhere(f"{path} is held by another process") from None
            log.info("waiting for another process, which holds %s", path)
            lock.acquire()
    except OSError as error:
        raise OSError(f"cannot lock {path} ({error.strerror}); choose a folder on a file system with flock") from error
    try:
        yield
    finally:
        lock.release()
