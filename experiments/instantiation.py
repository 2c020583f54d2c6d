"""From nodes of a configuration to the things that they name."""

import json
from typing import Any

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf


def instantiate(node: DictConfig | ListConfig) -> Any:
    """Build the thing that a node's `_target_` names, from plain containers; errors are those of the thing itself."""
    try:
        return hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        raise error.__cause__ or error from None


def as_json(node: DictConfig) -> str:
    return json.dumps(OmegaConf.to_container(node, resolve=True))
