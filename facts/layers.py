"""Which layers are compressed, and how one layer's tensors become `[N, T, d]`."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.networks import heads_of
from facts.pointwise import is_pointwise

EXCLUDED_NAMES = ("norm", "head", "patch_embed", "downsample", "classifier")
MIN_OUT_FEATURES = 10
MAKES_OUTPUTS = "it makes the outputs"


def select_layers(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, nn.Linear]:
    """The linear layers to compress, by qualified name (paper, section 5.1).

    Without `names`: all that have no reason to be left alone (`reasons_to_skip`). Raises `ValueError` for an unknown
    name, or where no layer is left.
    """
    linears = linear_layers(model)
    if names is None:
        reasons = reasons_to_skip(model)
        selected = {name: layer for name, layer in linears.items() if name not in reasons}
        if not selected:
            skipped = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if name in linears)
            raise ValueError(
                f"{type(model).__name__} has no linear layer to compress: of its {len(linears)} all are left alone "
                f"({skipped or 'there is none'}). Name the layers."
            )
        return selected
    names = list(names)
    if unknown := [name for name in names if name not in linears]:
        raise ValueError(f"no linear layer is called {', '.join(unknown)}; the model has {', '.join(linears)}")
    return {name: linears[name] for name in names}


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def pointwise_convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    """Its 1x1 convolutions, which can be compressed like linear layers."""
    return {name: module for name, module in model.named_modules() if is_pointwise(module)}


def reasons_to_skip(model: nn.Module) -> dict[str, str]:
    """Why linear layers and 1x1 convolutions are left alone unless they are named: those that make the outputs, small
    ones, what the paper leaves out by name, and what is more than a weight of its own."""
    heads = heads_of(model)
    users: dict[Tensor, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            users[weight].append(name)
    reasons = {}
    for name, layer in (linear_layers(model) | pointwise_convolutions(model)).items():
        excluded = [part for part in EXCLUDED_NAMES if part in name.replace("multihead", "")]
        others = [user for user in users.get(layer.weight, ()) if user != name]
        if layer in heads:
            reasons[name] = MAKES_OUTPUTS
        elif excluded:
            reasons[name] = f"its name holds `{excluded[0]}`"
        elif len(layer.weight) < MIN_OUT_FEATURES:
            reasons[name] = f"it has fewer than {MIN_OUT_FEATURES} outputs"
        elif others:
            reasons[name] = f"it shares its weight with {others[0]}"
        elif isinstance(layer, nn.Linear) and not _is_plain(layer):
            reasons[name] = f"it is a {type(layer).__name__}, which computes in a way of its own"
    return reasons


def _is_plain(layer: nn.Linear) -> bool:
    """Whether a layer with a `forward` of its own computes what a linear one does, tried where it has values."""
    if type(layer).forward is nn.Linear.forward or layer.weight.is_meta:
        return True
    vector = torch.linspace(-1, 1, layer.in_features).to(layer.weight)
    with torch.no_grad():
        return torch.equal(layer(vector), F.linear(vector, layer.weight, layer.bias))


def split_samples(tensor: Tensor, num_samples: int, layer: str) -> Tensor:
    """`[B, ..., d]` as `[N, T, d]`: every axis between the samples and the features is shared weights, so a token.

    The first axis may hold several rows a sample, as the windows of Swin do (`[N·windows, 49, d]`) or the flattened
    tokens of a Mamba mixer (`[N·T, d]`); rows of one sample lie together. Raises `ValueError` where it cannot be split.
    """
    if tensor.ndim < 2 or tensor.shape[0] % num_samples:
        raise ValueError(
            f"layer {layer} sees a tensor of shape {list(tensor.shape)} for a batch of {num_samples} samples: its "
            "first axis must hold the samples, or a whole number of rows a sample"
        )
    return tensor.reshape(num_samples, -1, tensor.shape[-1])


def batch_size(inputs: Any) -> int:
    """Number of samples in one batch: the first axis of its first tensor."""
    if isinstance(inputs, torch.Tensor):
        return inputs.shape[0]
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    return batch_size(next(iter(values)))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; afterwards every module is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradients of parameters, within the block."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with evaluating(model):
        try:
            model.requires_grad_(False)
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Within the block, modules run other forward functions than their own."""
    own = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, previous in own.items():
            vars(module).pop("forward", None)
            if previous is not None:
                module.forward = previous
