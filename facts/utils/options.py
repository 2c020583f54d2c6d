"""Methods by name, their options, checked before any work starts, and packages that only some uses need."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, fields, is_dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

T = TypeVar("T")

PACKAGE = Path(__file__).parents[1]

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


def meant(value: object) -> str:
    """Suggest the fraction that a percentage, 50 or 50%, stands for; nothing for other values."""
    try:
        percent = float(str(value).removesuffix("%"))
    except ValueError:
        return ""
    is_percentage = "%" in str(value) or percent >= 2  # 1.5 may stand for anything
    return f": did you mean {percent / 100:g}?" if is_percentage and 0 < percent <= 100 else ""


def first_line(error: Exception) -> str:
    """First line of an error's text, as compilers and libraries write hundreds; its type if it has no text."""
    return next(iter(str(error).splitlines()), repr(error))


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, Field))
def options(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass with keyword-only fields. Invalid values and unknown names are a `ValueError`."""
    made: Any = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))(cls)
    init = made.__init__

    @wraps(init)
    def with_faults_in_a_line(self: Any, *args: Any, **values: Any) -> None:
        try:
            init(self, *args, **values)
        except ValidationError as error:
            raise ValueError(f"{type(self).__name__}: {faults_of(error, known=options_of(type(self)))}") from error

    made.__init__ = with_faults_in_a_line
    return cast(type[T], made)


def options_of(cls: type) -> list[str]:
    """Names of a class's options; none of a class without."""
    return [each.name for each in fields(cls) if each.init] if is_dataclass(cls) else []


def faults_of(error: ValidationError, *place: str, known: Sequence[str] = ()) -> str:
    """Put pydantic's lines into one: each field with its value and what is allowed, and `known` ones for others."""
    found = error.errors()
    unknown = any(each["type"] == "unexpected_keyword_argument" and len(each["loc"]) == 1 for each in found)
    instead = f" (options: {', '.join(known)})" if unknown and known else ""
    return "; ".join(_fault(each, *place) for each in found) + instead


def _fault(found: ErrorDetails, *place: str) -> str:
    where = ".".join(map(str, (*place, *found["loc"])))
    # A missing field's input is all arguments, as is that of fields that do not fit together.
    has_value = found["loc"] and found["type"] != "missing"
    value = f"={' '.join(str(found['input']).split())[:100]}" if has_value else ""
    said = found.get("ctx", {}).get("error") or f"{found['msg'][0].lower()}{found['msg'][1:]}"
    return f"{where}{value}: {said}" if where else str(said)


class Docstring(NamedTuple):
    """A method's docstring: the first line without its source, and the rest."""

    summary: str
    details: str


class Methods(Mapping[str, type[T]]):
    """The methods in a package by file name: from each file, its first subclass of `base`, imported when it is read."""

    def __init__(self, package: str, base: type[T]):
        self.package, self.base = package, base

    def __getitem__(self, name: str) -> type[T]:
        if name not in list(self):
            raise KeyError(name)
        module = import_module(f"{self.package}.{name}")
        own = (thing for thing in vars(module).values() if getattr(thing, "__module__", None) == module.__name__)
        return next(thing for thing in own if isinstance(thing, type) and issubclass(thing, self.base))

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in _files(self.package))

    def __len__(self) -> int:
        return len(_files(self.package))

    def of_class(self, name: str) -> type[T]:
        """The method whose class has this name. Raises `AttributeError` if there is none."""
        if found := next((method for method in self.values() if method.__name__ == name), None):
            return found
        raise AttributeError(f"{self.package} has no class {name}")


def describe_methods(package: str) -> dict[str, Docstring]:
    """Read each file's docstring, `NAME: summary (source).` and details, by file name, without importing anything."""
    descriptions = {}
    for path in _files(package):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first, _, rest = text.partition("\n")
        summary = first.partition(": ")[2].partition(" (")[0].rstrip(".")
        assert summary, f"the docstring of {path} must begin with `NAME: summary (source).`"
        descriptions[path.stem] = Docstring(summary, rest.strip())
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


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Wrap imports: if a package is missing, the `ModuleNotFoundError` says which extra installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{what} needs {error.name}: pip install -e '.[{extra}]'", name=error.name) from error
