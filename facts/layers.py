"""Which layers are compressed, and how one layer's tensors become `[N, T, d]`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from facts.networks import head_of

EXCLUDED_NAMES = ("norm", "head", "patch_embed", "downsample")
MIN_OUT_FEATURES = 10


def select_layers(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, nn.Linear]:
    """The linear layers to compress, by qualified name (paper, section 5.1).

    Without `names`: every linear layer of at least 10 outputs whose name holds none of `norm`, `head`, `patch_embed`,
    `downsample`, and which is no language model's head. Raises `ValueError` for an unknown name, or where no layer is
    left.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if names is None:
        head = head_of(model)
        selected = {
            name: layer
            for name, layer in linears.items()
            if layer.out_features >= MIN_OUT_FEATURES
            and layer is not head
            and not any(part in name for part in EXCLUDED_NAMES)
        }
        if not selected:
            raise ValueError(
                f"{type(model).__name__} has no linear layer to compress: of its {len(linears)} linear layers none has "
                f"at least {MIN_OUT_FEATURES} outputs and a name without {', '.join(EXCLUDED_NAMES)}. Name the layers."
            )
        return selected
    names = list(names)
    if unknown := [name for name in names if name not in linears]:
        raise ValueError(f"no linear layer is called {', '.join(unknown)}; the model has {', '.join(linears)}")
    return {name: linears[name] for name in names}


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


def batch_size(inputs: object) -> int:
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
        for module, forward in own.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
