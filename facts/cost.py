"""What a network costs: floating-point operations and parameters, by the paper's rule and in full."""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import timm.layers
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from facts.layers import evaluating
from facts.lowrank import LowRankLinear
from facts.models.mambavision import SelectiveScan
from facts.networks import reads_tokens, run, skeleton, with_linear_layers

Rule = Literal["paper", "full"]
CostName = Literal["flops", "params", "latency"]
COST_NAMES = get_args(CostName)

STEMS = ("stem", "patch_embed")
LAYER_NORM_OPS, RMS_NORM_OPS, BATCH_NORM_OPS, GELU_OPS = 5, 4, 4, 1  # operations per element
SCAN_OPS = 9  # per element and state: decay, input, recurrence, read-out


@dataclass(frozen=True)
class Cost:
    """Floating-point operations for the given input (None where it is not known), and parameters of the network."""

    flops: int | None
    params: int


def count_cost(model: nn.Module, input_shape: tuple[int, ...], rule: Rule = "paper") -> Cost:
    """Count one forward pass on the meta device, where nothing is computed; of a network that has one `whole_forward`,
    which does more than `forward`.

    `input_shape` is one image `[C, H, W]`, or any shape with its batch axis, of tokens `[N, T]`. Both rules take two
    operations per multiply-accumulate and leave out biases and additions.

    - `paper`: linear layers, 2-D convolutions and transposed ones, GELU, LayerNorm and BatchNorm, the stem's own
      normalisation excepted. What mixes tokens without a weight matrix is not counted: attention's products, a Mamba
      mixer's 1-D convolution and scan.
    - `full`: every product of the forward pass (attention and 1-D convolutions included), every norm, GELU, the scan.
    """
    return count_pass(model, meta_input(model, input_shape), rule)


def count_pass(model: nn.Module, inputs: Any, rule: Rule = "paper") -> Cost:
    """`count_cost` for inputs that lie on the meta device already."""
    if rule not in ("paper", "full"):
        raise ValueError(f"rule must be 'paper' or 'full', got {rule!r}")
    network = with_linear_layers(skeleton(model)).eval()
    products = FlopCounterMode(display=False)
    counts = []

    def record(operations: Callable[..., int]) -> Callable[..., None]:
        return lambda module, args, output: counts.append(operations(module, args, output))

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for name, module in network.named_modules():
            operations = _elementwise(name, module, rule) or (_product(module) if rule == "paper" else None)
            if operations:
                module.register_forward_hook(record(operations))
        if rule == "full":
            stack.enter_context(products)
        getattr(network, "whole_forward", partial(run, network))(inputs)
    return Cost(sum(counts) + products.get_total_flops(), count_params(model))


def meta_input(model: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """A tensor without values for one image `[C, H, W]`, or of any shape with its batch axis; of tokens `[N, T]`."""
    shape = (1, *input_shape) if len(input_shape) == 3 else tuple(input_shape)
    dtype = torch.int64 if reads_tokens(model) else _dtype(model)
    return torch.empty(shape, dtype=dtype, device="meta")


def count_rows(model: nn.Module, layers: Iterable[str], inputs: Any) -> dict[str, int]:
    """How many vectors each layer multiplies in one forward pass on `inputs`, which may lie on the meta device."""
    return {name: num_vectors(shapes) for name, shapes in watched(model, layers, inputs)[0].items()}


def num_vectors(shapes: Iterable[torch.Size]) -> int:
    """How many vectors tensors of these shapes `[..., d]` hold together."""
    return sum(math.prod(shape[:-1]) for shape in shapes)


def watched(model: nn.Module, layers: Iterable[str], inputs: Any) -> tuple[dict[str, list[torch.Size]], set[str]]:
    """The shapes of what each layer is given in one forward pass, a call each; and which of them make its outputs."""
    device = next(iter(tree_iter(inputs))).device
    network = skeleton(model) if device.type == "meta" else model
    shapes: dict[str, list[torch.Size]] = {name: [] for name in layers}
    last: dict[str, Any] = {}

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        shapes[name].append(args[0].shape)
        last[name] = output

    with ExitStack() as stack, torch.no_grad(), evaluating(network):
        for name in shapes:
            hook = network.get_submodule(name).register_forward_hook(partial(note, name))
            stack.callback(hook.remove)
        outputs = {id(leaf) for leaf in tree_leaves(run(network, inputs))}
    return shapes, {name for name, output in last.items() if id(output) in outputs}


def count_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _product(module: nn.Module) -> Callable[..., int] | None:
    match module:
        case LowRankLinear():
            return lambda m, _, out: 2 * out.numel() // m.out_features * m.rank * (m.in_features + m.out_features)
        case nn.Linear():
            return lambda m, _, out: 2 * out.numel() * m.in_features
        case nn.Conv2d():
            return lambda m, _, out: 2 * out.numel() * m.weight[0].numel()
        case nn.ConvTranspose2d():
            return lambda m, args, _: 2 * args[0].numel() * m.weight[0].numel()
    return None


def _elementwise(name: str, module: nn.Module, rule: Rule) -> Callable[..., int] | None:
    if rule == "paper" and name.startswith(STEMS) and isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
        return None
    match module:
        case nn.GELU() | timm.layers.GELU() | timm.layers.GELUTanh():
            return lambda _, args, out: GELU_OPS * out.numel()
        case nn.LayerNorm():
            return lambda _, args, out: LAYER_NORM_OPS * out.numel()
        case nn.BatchNorm2d():
            return lambda _, args, out: BATCH_NORM_OPS * out.numel()
        case _ if rule == "full" and type(module).__name__.endswith("RMSNorm"):  # each architecture has its own
            return lambda _, args, out: RMS_NORM_OPS * out.numel()
        case SelectiveScan() if rule == "full":
            return lambda _, args, out: SCAN_OPS * out.numel() * args[2].shape[1]  # A is [channels, states]
    return None


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
