"""Files that are whole or not there: written under another name first, then renamed."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder that becomes `path` when the block succeeds and disappears when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class ScratchFolder:
    """A temporary folder `path` that is removed when nothing refers to this object any more."""

    def __init__(self):
        self.path = Path(tempfile.mkdtemp(prefix="facts-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def writable_folder(path: Path) -> Path:
    """`path`, made if need be. Raises `OSError` that says what to do where nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise OSError(f"cannot write to the folder {path} ({error.strerror}); choose another one or free it") from error
