"""Imports of packages that only some uses need."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Wrap imports: if a package is missing, the `ModuleNotFoundError` says which extra installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{what} needs {error.name}: pip install -e '.[{extra}]'", name=error.name) from error
