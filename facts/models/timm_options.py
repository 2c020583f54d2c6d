"""timm's options that a network was built with, as far as the network shows them."""

from typing import Any

from timm.layers import DropPath
from torch import nn


def differing_options(model: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """Find the options of `timm.create_model` in which a network differs from the plain one of the same name."""
    usual = _options(plain)
    return {name: value for name, value in _options(model).items() if value not in (None, usual[name])}


def _options(model: nn.Module) -> dict[str, Any]:
    """Common options as timm's networks record them; None for an option that a network does not record."""
    first = dict(model.named_parameters()).get(f"{model.pretrained_cfg.get('first_conv')}.weight")
    embedding = getattr(model, "patch_embed", getattr(model, "stem", None))
    image = getattr(embedding, "img_size", None)
    pool = getattr(model, "global_pool", None)
    return {
        "in_chans": None if first is None else first.shape[1],
        "img_size": list(image) if isinstance(image, tuple) else None,
        "global_pool": pool if isinstance(pool, str) else getattr(pool, "pool_type", None),
        "drop_rate": getattr(model, "drop_rate", _dropout(model, "head_drop")),
        "proj_drop_rate": _dropout(model, "proj_drop"),
        "attn_drop_rate": _dropout(model, "attn_drop"),
        "drop_path_rate": max(
            (_rate(path.drop_prob) for path in model.modules() if isinstance(path, DropPath)), default=None
        ),
    }


def _dropout(model: nn.Module, name: str) -> float | None:
    """Rate of the first `nn.Dropout` with this name; all blocks have the same."""
    found = (module for path, module in model.named_modules() if path.rpartition(".")[2] == name)
    return next((_rate(module.p) for module in found if isinstance(module, nn.Dropout)), None)


def _rate(probability: float) -> float:
    """Undo timm's rounding to float32: 0.1 rather than 0.10000000149."""
    return round(probability, 6)
