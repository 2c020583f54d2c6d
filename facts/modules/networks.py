"""Networks: inputs and outputs, as images or as transformers expects them, and temporary modes."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only

HALF = (torch.float16, torch.bfloat16)
NOT_COMPUTED_BY = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}


def run(model: nn.Module, inputs: Any) -> Any:
    """Return a network's outputs; for a transformers network, which may take inputs by name, its logits, if any."""
    if not is_transformers(model):
        return model(inputs)
    settings = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    on_meta = next(iter(tree_iter(inputs))).device.type == "meta"
    with FakeTensorMode(allow_non_fake_inputs=True) if on_meta else nullcontext() as fake:
        if fake:  # transformers reads values, unless a tensor is marked as having none
            inputs = tree_map_only(Tensor, fake.from_tensor, inputs)
        outputs = model(**inputs, **settings) if isinstance(inputs, Mapping) else model(inputs, **settings)
    return outputs.get("logits", outputs)


def whole_image(outputs: Any) -> Any:
    """Pick the features of whole images, `[N, D]`, among the outputs of transformers; return other outputs as given."""
    named = (getattr(outputs, name, None) for name in ("image_embeds", "pooler_output"))
    return next((each for each in named if each is not None), outputs)


class OneTensor(nn.Module):
    """A network of transformers that returns one tensor: logits `[N, C]`, or else features of the images `[N, D]`."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the network on inputs `[N, ...]`. Raises `ValueError` for other outputs."""
        found = whole_image(run(self.network, inputs))
        if not isinstance(found, Tensor):
            name = type(self.network).__name__
            raise ValueError(f"{name} has neither logits nor pooler_output: wrap it in a module that picks one tensor")
        return found


def is_transformers(model: nn.Module) -> bool:
    return hasattr(model, "main_input_name")


def reads_tokens(model: nn.Module) -> bool:
    """Check that the inputs are token indices: integers `[N, T]`."""
    return is_transformers(model) and model.main_input_name == "input_ids"


def problem_of(model: nn.Module) -> str | None:
    """How a transformers network says that its outputs are read, such as `multi_label_classification`."""
    return getattr(model.config, "problem_type", None) if is_transformers(model) else None


def is_encoder(model: nn.Module) -> bool:
    """Check for a network for images, of timm or transformers, whose outputs are features: it has no classifier."""
    if is_transformers(model):
        has_head = any("For" in each.__name__ for each in type(model).__mro__)  # ViTForImageClassification
        return model.main_input_name == "pixel_values" and not has_head
    return getattr(model, "num_classes", None) == 0


def type_of(model: nn.Module) -> torch.dtype:
    """The floating-point type of most of a network's parameters; the first one may be an index or a scale."""
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def precision_of(model: nn.Module) -> torch.dtype:
    """The type in which a network computes without autocast to another: its own in half precision, or float32."""
    return own if (own := type_of(model)) in HALF else torch.float32


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, saved buffers and, of what `get_extra_state` returns, tensors, by name; shared ones by all names."""
    return {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Settings, besides the weights, of a transformers network (heads, windows, rotations); otherwise empty."""
    settings = model.config.to_diff_dict() if is_transformers(model) else {}
    return {name: settings[name] for name in sorted(settings.keys() - NOT_COMPUTED_BY)}


def continues_text(model: nn.Module) -> bool:
    """Check for a language model that predicts each token from the previous ones."""
    return reads_tokens(model) and model.can_generate() and not is_encoder_decoder(model)


def is_encoder_decoder(model: nn.Module) -> bool:
    return is_transformers(model) and bool(model.config.is_encoder_decoder)


def output_layers(model: nn.Module) -> set[nn.Module]:
    """Find the layers that compute logits, whatever their names, as transformers and timm define them."""
    own = getattr(model, "get_output_embeddings" if is_transformers(model) else "get_classifier", lambda: None)()
    heads = own if isinstance(own, tuple) else (own,)
    return {layer for head in heads if isinstance(head, nn.Module) for layer in head.modules()}


def blocks_of(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Find the blocks that contain the layers, leaving out blocks nested in other blocks.

    A layer's block is the nearest module around it that is an entry of an `nn.ModuleList` or `nn.Sequential`.
    """
    layers = set(layers)
    places = [name for name, module in model.named_modules(remove_duplicate=False) if module in layers]
    blocks = dict.fromkeys(block for place in places if (block := _block_around(model, place)))
    within = {module for block in blocks for module in block.modules() if module is not block}
    return [block for block in blocks if block not in within]


def _block_around(model: nn.Module, name: str) -> nn.Module | None:
    path = name.split(".")
    for depth in range(len(path) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(path[: depth - 1])), nn.ModuleList | nn.Sequential):
            return model.get_submodule(".".join(path[:depth]))
    return None


def noise(model: nn.Module, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Make a meaningless batch for timing: noise images, or tokens `[N, T]` that are all index 0."""
    if reads_tokens(model):
        return torch.zeros(shape, dtype=torch.int64, device=device)
    return torch.randn(shape, dtype=type_of(model), device=device)


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """Autocast to `precision`; disabled for float32."""
    return torch.autocast(device.type, precision, enabled=precision != torch.float32)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Disable the caller's autocast within the block, and its cache, which would keep outdated casts of weights."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False, cache_enabled=False)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode within the block; every module returns to its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode, without gradients of parameters, within the block."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with evaluating(model):
        try:
            model.requires_grad_(False)
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)


@contextmanager
def hooked(
    after: Iterable[tuple[nn.Module, Callable]] = (), before: Iterable[tuple[nn.Module, Callable]] = ()
) -> Iterator[None]:
    """Register forward hooks, and pre-hooks, which get keyword arguments too, on modules within the block."""
    with ExitStack() as stack:
        for module, hook in after:
            stack.callback(module.register_forward_hook(hook).remove)
        for module, hook in before:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable]) -> Iterator[None]:
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
