"""Functions that the files in `conf/` name, as in `${at_home:${results}}`."""

import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from facts.utils.files import at_home


def of_paper(_parent_: DictConfig) -> Any:
    """The paper's choice, for a profile without one of its own; a choice of your own may lack it, too."""
    return None if OmegaConf.is_missing(_parent_, "paper") else _parent_.paper


def wandb_mode() -> str:
    """W&B's mode by the environment, `offline` without a choice."""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return "disabled"
    mode = os.environ.get("WANDB_MODE") or "offline"
    return {"dryrun": "offline", "run": "online"}.get(mode, mode)  # older names


for resolver in (of_paper, wandb_mode, at_home):
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
