"""Instantiation of the objects that nodes of a configuration name."""

import json
from typing import Any

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf


def instantiate(node: DictConfig | ListConfig) -> Any:
    """Build the object of a node's `_target_` from plain containers; its own errors are raised."""
    try:
        return hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        raise error.__cause__ or error from None


def as_json(node: DictConfig) -> str:
    return json.dumps(OmegaConf.to_container(node, resolve=True))
