"""Networks of mmdetection and mmsegmentation, given by the libraries' own configurations."""

import importlib
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal, Self

import torch
from pydantic import field_validator
from torch import Tensor, nn

from facts.models.builders import Recipe, TimmModel, nested
from facts.models.feature_network import FeatureNetwork, SelfAttention, WindowAttention
from facts.utils.options import options
from facts.utils.silence import silence

LAYERS = ("BN", "GELU", "GN", "LN", "ReLU", "SyncBN")  # any other name might make the library import something


@options
class OpenMMLabModel(Recipe):
    """A network, given by the name of a library's configuration, such as `swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py`.

    `arguments` change fields of its `model`, by dotted name: `{"backbone.embed_dims": 128}`. `weights` is a file of the
    library or of this package, or `random`. Training starts with the backbone of `classifier`.
    """

    kind: ClassVar[str] = "openmmlab"
    toolbox: Literal["mmdet", "mmseg"]
    config: str
    classifier: TimmModel | None = None

    @field_validator("config")
    @classmethod
    def _inside(cls, config: str) -> str:
        path = PurePosixPath(config)
        if path.is_absolute() or ".." in path.parts or "\\" in config or path.suffix != ".py":
            raise ValueError(f"{config!r} is not a file name among the library's configurations, which are code")
        return config

    @property
    def name(self) -> str:
        return f"{self.toolbox}/{self.config}"

    @property
    def repository(self) -> str:
        raise ValueError(f"the weights of {self.config} are not at Hugging Face: set weights to a file or `random`")

    @property
    def published(self) -> str | None:
        """Address of the library's own weights for this configuration, if any; it ends with eight digits of SHA-256."""
        from mmengine import load

        if self.arguments:
            return None
        lists = (configurations(self.toolbox) / self.config).parent.glob("metafile.y*ml")
        weights = {entry["Config"]: entry.get("Weights") for path in lists for entry in load(path)["Models"]}
        return weights.get(f"configs/{self.config}")

    def architecture(self) -> FeatureNetwork:
        device = torch.get_default_device()  # the libraries read tensor values while building, so not on `meta`
        with torch.device("cpu"):
            network = FeatureNetwork(library_network(self))
        from mmcv.cnn.bricks.transformer import MultiheadAttention  # installed, since the network was built

        for name, module in list(network.named_modules()):
            if isinstance(module, MultiheadAttention):
                network.set_submodule(name, SelfAttention(module))
            elif type(module).__name__ == "WindowMSA":  # each library has its own
                network.set_submodule(name, WindowAttention(module))
        return network.to(device)

    def portable(self) -> Self:
        return replace(super().portable(), classifier=None)

    def refuse_foreign(self) -> None:
        super().refuse_foreign()
        if self.classifier:
            raise ValueError("the recipe names a classifier to be loaded, which a saved network does not need")
        for path, value in nested(self.arguments):
            parts = path.split(".")
            foreign = [part for part in parts if part.startswith(("_", "init_cfg", "pretrained"))]
            if foreign or ("type" in parts and value not in LAYERS):
                found = f"the recipe's arguments set {(*foreign, 'type')[0]} to {value!r}"
                raise ValueError(f"{found}: they may only be sizes, and types among {', '.join(LAYERS)}")

    def renamed(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Move all but backbone and neck under `heads`, and rename attention's layers."""
        return {_renamed(name): tensor for name, tensor in tensors.items()}


def library_network(recipe: OpenMMLabModel) -> nn.Module:
    """Build the network with its library, with random weights. Raises `ImportError` without OpenMMLab's libraries."""
    try:
        importlib.import_module(f"{recipe.toolbox}.models")  # fills the registry
    except ImportError as error:
        raise ImportError(f"{recipe.toolbox} cannot be imported ({error}): make install-detection") from error
    from mmengine.config import Config
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import DefaultScope

    config = Config.fromfile(configurations(recipe.toolbox) / recipe.config)
    config.merge_from_dict({f"model.{name}": value for name, value in recipe.arguments.items()})
    config.model.backbone.init_cfg = None  # no download
    if "pretrained" in config.model:
        config.model.pretrained = None
    with silence(), DefaultScope.overwrite_default_scope(recipe.toolbox):
        registry = importlib.import_module(f"{recipe.toolbox}.registry")
        network = revert_sync_batchnorm(registry.MODELS.build(config.model))
        network.init_weights()
    return network


def configurations(toolbox: str) -> Path:
    """Folder of the library's configurations."""
    return Path(importlib.import_module(toolbox).__path__[0], ".mim", "configs")


def _renamed(name: str) -> str:
    if not name.startswith(("backbone.", "neck.", "heads.")):
        name = f"heads.{name}"
    return name.replace(".attn.attn.in_proj_", ".attn.qkv.").replace(".attn.attn.out_proj.", ".attn.proj.")
