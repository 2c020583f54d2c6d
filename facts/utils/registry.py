"""Methods by name: each is one file in a folder, and has the file's name."""

import ast
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

PACKAGE = Path(__file__).parents[1]


class Description(NamedTuple):
    """A method's docstring: the first line without its source, and the rest."""

    summary: str
    details: str


def load_methods(package: str, base: type[T]) -> dict[str, type[T]]:
    """Import the methods in a package by file name: from each file, its first subclass of `base`."""
    methods = {}
    for path in _files(package):
        module = import_module(f"{package}.{path.stem}")
        own = (thing for thing in vars(module).values() if getattr(thing, "__module__", None) == module.__name__)
        methods[path.stem] = next(thing for thing in own if isinstance(thing, type) and issubclass(thing, base))
    return methods


def describe_methods(package: str) -> dict[str, Description]:
    """Read the docstring of each file in a package, by file name, without importing anything.

    A docstring begins with `NAME: summary (source).`
    """
    descriptions = {}
    for path in _files(package):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first, _, rest = text.partition("\n")
        summary = first.partition(": ")[2].partition(" (")[0].rstrip(".")
        assert summary, f"the docstring of {path} must begin with `NAME: summary (source).`"
        descriptions[path.stem] = Description(summary, rest.strip())
    return descriptions


def by_name(value: str | T, known: Mapping[str, type[T]], what: str) -> T:
    """Return `value` itself, or a default instance of the class it names. Raises `ValueError` with the choices."""
    if isinstance(value, type):
        raise ValueError(f"{what} must be a name or an instance: {value.__name__}(), not {value.__name__}")
    if not isinstance(value, str):
        return value
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(known)}, or pass an instance")
    return known[value]()


def _files(package: str) -> list[Path]:
    return sorted(PACKAGE.joinpath(*package.split(".")[1:]).glob("[!_]*.py"))
