"""What networks take and give: images go in as they are, tokens as transformers wants them."""

import copy
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only

NOT_COMPUTED_BY = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}


def run(model: nn.Module, inputs: Any) -> Any:
    """The network's outputs; of one of transformers its logits, if it has any, made without a cache of keys and values.

    Such a network gets a mapping of inputs by name.
    """
    if not is_transformers(model):
        return model(inputs)
    settings = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with FakeTensorMode(allow_non_fake_inputs=True) if _on_meta(inputs) else nullcontext() as fake:
        if fake:  # it would ask for values, but not of a tensor that says it has none
            inputs = tree_map_only(Tensor, fake.from_tensor, inputs)
        outputs = model(**inputs, **settings) if isinstance(inputs, Mapping) else model(inputs, **settings)
    return outputs.get("logits", outputs)


def is_transformers(model: nn.Module) -> bool:
    return hasattr(model, "main_input_name")


def reads_tokens(model: nn.Module) -> bool:
    """Whether its inputs are numbers of tokens: whole ones, `[N, T]`."""
    return is_transformers(model) and model.main_input_name == "input_ids"


def settings_of(model: nn.Module) -> dict[str, Any]:
    """What a network of transformers computes by besides its weights: heads, windows, rotations; else nothing."""
    settings = model.config.to_diff_dict() if is_transformers(model) else {}
    return {name: settings[name] for name in sorted(settings.keys() - NOT_COMPUTED_BY)}


def head_of(model: nn.Module) -> nn.Module | None:
    """The layer that makes logits of a network of transformers, whatever its name; it may share the embeddings."""
    return model.get_output_embeddings() if is_transformers(model) else None


def noise(model: nn.Module, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A batch that says nothing, to be timed: images of noise, or tokens `[N, T]` that are all the first one."""
    if reads_tokens(model):
        return torch.zeros(shape, dtype=torch.int64, device=device)
    return torch.randn(shape, dtype=next(model.parameters()).dtype, device=device)


def copy_with(model: nn.Module, replaced: Mapping[Tensor, Tensor] | None = None) -> nn.Module:
    """A copy with other tensors in the place of some, and with the same tokenizer."""
    known = {id(original): other for original, other in (replaced or {}).items()}
    tokenizer = getattr(model, "tokenizer", None)
    return copy.deepcopy(model, known | {id(tokenizer): tokenizer})


def skeleton(model: nn.Module) -> nn.Module:
    """A copy on the meta device, for which no weight is copied."""
    weights = {parameter: nn.Parameter(parameter.detach().to("meta"), False) for parameter in model.parameters()}
    buffers = {buffer: buffer.to("meta") for buffer in model.buffers()}
    return copy_with(model, weights | buffers).to("meta")


def with_linear_layers(model: nn.Module) -> nn.Module:
    """The network itself; or, where it holds GPT-2's `Conv1D`, a copy in which each of them is an `nn.Linear`.

    A `Conv1D` is a linear layer with its weight transposed, `[d_in, d_out]`.
    """
    library = sys.modules.get("transformers.pytorch_utils")  # who has such a layer has imported it
    names = [name for name, module in model.named_modules() if library and isinstance(module, library.Conv1D)]
    if not names:
        return model
    weights = [model.get_submodule(name).weight for name in names]
    model = copy_with(model, {weight: weight for weight in weights})  # they are copied below
    for name in names:
        layer = model.get_submodule(name)
        linear = nn.Linear(*layer.weight.shape, device="meta")
        linear.weight, linear.bias = nn.Parameter(layer.weight.detach().T.contiguous()), layer.bias
        model.set_submodule(name, linear)
    return model


def _on_meta(inputs: Any) -> bool:
    return next(tree_iter(inputs)).device.type == "meta"
