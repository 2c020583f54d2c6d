"""Choices by name."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def by_name(value: str | T, known: Mapping[str, type[T]], what: str) -> T:
    """An instance: `value` itself, or the default one of the class it names. Raises `ValueError` with the choices."""
    if not isinstance(value, str):
        return value
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(known)}, or pass an instance")
    return known[value]()
