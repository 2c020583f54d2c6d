"""Optional packages of some experiments: which are installed, and how to install the others."""

import importlib.util

MODULES = {
    "analysis": ("hyppo",),
    "detection": ("mmcv._ext", "mmdet", "mmseg"),  # a plain install lacks mmcv's operators, the first of these
    "highs": ("highspy",),
    "llm": ("accelerate", "datasets", "lm_eval", "tokenizers", "transformers"),
    "pruning": ("torch_pruning",),
}
TASKS = {"mmdet": "coco", "mmseg": "ade20k"}  # by the toolbox of a network
OF_TASKS = {"coco": "detection", "ade20k": "detection", "language": "llm"}
COMMANDS = {"detection": "make install-detection", "llm": "make install-llm"}


def missing_packages(extra: str | None) -> list[str]:
    """Packages of an extra that cannot be imported here."""
    return [module for module in MODULES.get(extra or "", ()) if not _is_there(module)]


def how_to_install(extra: str) -> str:
    return COMMANDS.get(extra, f"pip install -e '.[{extra}]'")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False
