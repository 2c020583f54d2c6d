"""Instantiation of the objects named in a configuration."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import ValidationError

T = TypeVar("T")


def instantiate(node: DictConfig | ListConfig, key: str = "") -> Any:
    """Build a node's `_target_`. Raises a one-line `ValueError` for fields out of range and unknown targets."""
    check_is_group(node)
    try:
        return hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        place, cause = key or node._get_full_key(None), error.__cause__
        if isinstance(cause, ValidationError):
            raise out_of_range(cause, place) from None
        if cause is None or str(error).startswith("Error locating target"):
            reason = " ".join(str(cause or error).split("\n")[: 2 if cause else 1])
            raise ValueError(f"{place}._target_: {reason}") from None
        raise cause from None


def check_is_group(node: Any) -> None:
    """Raise `ValueError` for a single value where a group of fields is expected."""
    if not OmegaConf.is_config(node):
        raise ValueError(
            f"got {node!r} where a group of fields is expected: set its fields, as in hardware.timing.num_turns=5"
        )


def checked(kind: Callable[..., T], node: DictConfig) -> T:
    """Build an object from the fields of a node without a target. Raises `ValueError` as `instantiate` does."""
    check_is_group(node)
    try:
        return kind(**{str(name): value for name, value in node.items()})
    except ValidationError as error:
        raise out_of_range(error, node._get_full_key(None)) from None


def out_of_range(error: ValidationError, key: str) -> ValueError:
    """Put an error into one line: each field with its value and what is allowed."""
    fields = (
        f"{'.'.join(map(str, (key, *each['loc'])))}={each['input']}: {each['msg'][0].lower()}{each['msg'][1:]}"
        for each in error.errors()
    )
    return ValueError("; ".join(fields))


def plain(value: Any) -> Any:
    """Resolve a configuration's value into plain containers."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def as_json(node: DictConfig) -> str:
    return json.dumps(plain(node))
