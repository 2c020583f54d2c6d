"""Names in configurations: functions, `${at_home:${results}}`, and classes, `estimator=my_methods.Diagonal`."""

import os
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from pydantic.fields import FieldInfo

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


class Classes(ConfigSource):
    """Estimators and searches by their class's name, `module.Class`: a choice with the class's options."""

    @staticmethod
    def scheme() -> str:
        return "class"

    def load_config(self, config_path: str) -> ConfigResult:
        name = config_path.partition("/")[2]
        module, _, kind = name.rpartition(".")
        made = {each.name: _default_of(each) for each in fields(getattr(import_module(module), kind)) if each.init}
        return ConfigResult("class", self.full_path(), OmegaConf.create({"_target_": name, **made}), {"package": None})

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        module, _, kind = name.rpartition(".")
        if group not in ("estimator", "search") or not module:
            return False
        try:
            return is_dataclass(getattr(import_module(module), kind, None))
        except ModuleNotFoundError as error:
            if not error.name or not module.startswith(error.name):  # it is one that the module imports
                raise
            return False

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _default_of(option: Any) -> Any:
    """A field's default, in pydantic's form too; `???` for one that must be set."""
    if isinstance(option.default, FieldInfo):
        return "???" if option.default.is_required() else option.default.get_default(call_default_factory=True)
    if option.default_factory is not MISSING:
        return option.default_factory()
    return "???" if option.default is MISSING else option.default


SourcesRegistry.instance().register(Classes)
