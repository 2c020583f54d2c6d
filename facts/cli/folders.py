"""Folders that commands write."""

from pathlib import Path

from facts.saving.manifest import MANIFEST
from facts.utils.files import writable_folder


def for_result(folder: Path) -> None:
    """Make the folder for a compressed network, before any work.

    Raises an `OSError` if it cannot be written, or holds anything but an older result.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise FileExistsError(f"{folder} holds something else than a compressed network: give a new or empty folder")
    writable_folder(folder)
