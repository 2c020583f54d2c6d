"""Optional packages of some experiments: which are installed, and how to install the others."""

import importlib.metadata
import importlib.util

MODULES = {
    "analysis": ("hyppo",),
    "detection": ("mmcv._ext", "mmdet", "mmseg"),  # the first are mmcv's operators, without which a plain install is
    "highs": ("highspy",),
    "llm": ("accelerate", "datasets", "lm_eval", "tokenizers", "transformers"),
    "pruning": ("torch_pruning",),
}
TASKS = {"mmdet": "coco", "mmseg": "ade20k"}  # by the library of their networks
OF_TASKS = {"coco": "detection", "ade20k": "detection", "language": "llm"}
COMMANDS = {"detection": "make install-detection", "llm": "make install-llm"}
NAMES = {"mmcv._ext": "mmcv's operators"}


def missing_packages(extra: str | None) -> list[str]:
    """Packages of an extra that cannot be imported here."""
    return [NAMES.get(module, module) for module in MODULES.get(extra or "", ()) if not _is_there(module)]


def how_to_install(extra: str) -> str:
    return COMMANDS.get(extra, f"pip install -e '.[{extra}]'")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is a part of
        return False
