"""Networks of mmdetection and mmsegmentation by those libraries' own configurations."""

import importlib
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from facts.models.builders import Recipe, TimmModel
from facts.models.feature_network import FeatureNetwork, SelfAttention
from facts.quiet import quiet


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class OpenMMLabModel(Recipe):
    """A network by a file among the library's configurations, such as `swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py`.

    `arguments` change fields of its `model`, by dotted name: `{"backbone.embed_dims": 128}`. `weights` is a checkpoint
    file of the library or of this package, or `random`. `classifier` is the network that the backbone was trained as
    before.
    """

    kind: ClassVar[str] = "openmmlab"
    toolbox: Literal["mmdet", "mmseg"]
    config: str
    classifier: TimmModel | None = None

    @property
    def repository(self) -> str:
        raise ValueError(
            f"the weights of {self.config} are not at Hugging Face: set weights to a checkpoint file, or to `random`"
        )

    def architecture(self) -> FeatureNetwork:
        device = torch.get_default_device()  # the libraries read numbers off tensors as they build: not on `meta`
        with torch.device("cpu"):
            network = FeatureNetwork(library_network(self))
        from mmcv.cnn.bricks.transformer import MultiheadAttention  # there, since the network is

        for name, module in list(network.named_modules()):
            if isinstance(module, MultiheadAttention):
                network.set_submodule(name, SelfAttention(module))
        return network.to(device)

    def renamed(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """What is neither backbone nor neck in the library's own files belongs to the heads."""
        return {_renamed(name): tensor for name, tensor in tensors.items()}


def library_network(recipe: OpenMMLabModel) -> nn.Module:
    """The network as its library builds it, with random weights. Raises `ImportError` without OpenMMLab's libraries."""
    try:
        importlib.import_module(f"{recipe.toolbox}.models")  # fills the registry
    except ImportError as error:
        raise ImportError(f"{recipe.toolbox} cannot be imported ({error}): make install-detection") from error
    from mmengine.config import Config
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import DefaultScope

    library = importlib.import_module(recipe.toolbox)
    config = Config.fromfile(Path(library.__file__).parent / ".mim" / "configs" / recipe.config)
    config.merge_from_dict({f"model.{name}": value for name, value in recipe.arguments.items()})
    config.model.backbone.init_cfg = None  # no download
    if "pretrained" in config.model:
        config.model.pretrained = None
    with quiet(), DefaultScope.overwrite_default_scope(recipe.toolbox):
        registry = importlib.import_module(f"{recipe.toolbox}.registry")
        network = revert_sync_batchnorm(registry.MODELS.build(config.model))
        network.init_weights()
    return network


def _renamed(name: str) -> str:
    if not name.startswith(("backbone.", "neck.", "heads.")):
        name = f"heads.{name}"
    return name.replace(".attn.attn.in_proj_", ".attn.qkv.").replace(".attn.attn.out_proj.", ".attn.proj.")
