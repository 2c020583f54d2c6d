"""Options of methods: checked when an object is built, before any work starts."""

from dataclasses import field
from typing import Annotated, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, Field))
def options(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass with keyword-only fields. Invalid values and unknown names are errors."""
    return cast(type[T], dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))(cls))
