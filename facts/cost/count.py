"""Cost of a network: floating-point operations and parameters, by the paper's rule and in full."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, get_args

import timm.layers
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from facts.modules.linear_calls import skeleton, with_linear_layers
from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import hooked, reads_tokens, run, tensors_of, type_of
from facts.utils.batches import tensors_in

Rule = Literal["paper", "full"]
CostName = Literal["flops", "params", "latency"]
COST_NAMES = get_args(CostName)

STEMS = ("stem", "patch_embed")
LAYER_NORM_OPS, RMS_NORM_OPS, BATCH_NORM_OPS, GELU_OPS = 5, 4, 4, 1  # operations per element
SCAN_OPS = 9  # per element and state: decay, input, recurrence, read-out
FACTORS: dict[str, tuple[int, ...]] = {  # their arguments
    **dict.fromkeys(("mm", "bmm", "convolution", "mv"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
    "_trilinear": (0, 1, 2),  # of nn.Bilinear: two inputs and a weight
}


@dataclass(frozen=True)
class Cost:
    """Floating-point operations for the given input (None if unknown), and parameters of the network."""

    flops: int | None
    params: int


@dataclass(frozen=True)
class Size:
    """Bytes of the weights, and their types, such as `float32`."""

    num_bytes: int = 0
    types: str = ""

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype | None = None) -> Self:
        """Measure parameters and saved buffers, shared ones once; real ones are stored as `dtype` (None: unchanged)."""
        kinds = Counter[str]()
        for tensor in {each.untyped_storage()._cdata: each for each in tensors_of(model).values()}.values():
            kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
            kinds[str(kind).removeprefix("torch.")] += tensor.numel() * kind.itemsize
        types = (kind for kind, num_bytes in kinds.most_common() if num_bytes > 0.1 * kinds.total())
        return cls(kinds.total(), ", ".join(types))


def count_cost(model: nn.Module, input_shape: tuple[int, ...], rule: Rule = "paper") -> Cost:
    """Count one forward pass on the meta device, where nothing is computed.

    If the network has a `whole_forward`, which does more than `forward`, that is counted. `input_shape` is one image
    `[C, H, W]`, or any shape with its batch axis, such as tokens `[N, T]`. Both rules count two operations per
    multiply-accumulate and leave out biases and additions. Raises `ValueError` for other rules.

    - `paper`: linear layers, 2-D convolutions (also transposed), other matrix products with a weight, such as
      `F.linear(x, layer.weight)`, GELU, LayerNorm and BatchNorm, except the stem's own normalisation. Products that mix
      tokens without a weight matrix are not counted: attention's products, a Mamba mixer's 1-D convolution and scan.
    - `full`: every product of the forward pass (attention and 1-D convolutions included), every norm, GELU, the scan.
    """
    if rule not in ("paper", "full"):
        raise ValueError(f"rule must be 'paper' or 'full', got {rule!r}")
    return Cost(count_flops(model, meta_input(model, input_shape), rule), count_params(model))


def count_flops(model: nn.Module, example: Any, rule: Rule) -> int:
    """Count one forward pass for an input on the meta device, as `count_cost` does."""
    network = with_linear_layers(skeleton(model)).eval()
    products = FlopCounterMode(display=False)
    with torch.no_grad(), counting(network, rule) as operations, products if rule == "full" else nullcontext():
        whole_forward(network)(example)
    return sum(operations) + products.get_total_flops()


@contextmanager
def counting(network: nn.Module, rule: Rule) -> Iterator[list[int]]:
    """Within the block, forward passes append their operations to the list, one number per call of a module.

    By the paper's rule, products with weights outside of modules that are counted have a number each too.
    """
    counts: list[int] = []
    functions = _Functions(network, counts)

    def note(operations: Callable[..., int], module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        counts.append(operations(module, args, output))

    products = {each: count for each in network.modules() if rule == "paper" and (count := _product(each))}
    others = {each: count for name, each in network.named_modules() if (count := _elementwise(name, each, rule))}
    after = [(module, partial(note, operations)) for module, operations in (products | others).items()]
    around = [(module, functions.leave_module) for module in products]
    before = [(module, functions.enter_module) for module in products]
    with hooked([*around, *after], before), functions if rule == "paper" else nullcontext():
        yield counts


class _Functions(TorchDispatchMode):
    """Appends the operations of products of activations and weights, unless a module counts them itself."""

    def __init__(self, network: nn.Module, counts: list[int]):
        super().__init__()
        self.counts, self.num_around = counts, 0
        self.weights: dict[int, Tensor] = {id(each): each for each in network.parameters()}  # and views of them, kept

    def enter_module(self, *_: Any) -> None:
        self.num_around += 1

    def leave_module(self, *_: Any) -> None:
        self.num_around -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        if self.num_around:
            return output
        if factors := FACTORS.get(func.overloadpacket.__name__):
            is_1d = func.overloadpacket.__name__ == "convolution" and args[0].ndim == 3
            if not is_1d and sum(id(args[each]) in self.weights for each in factors) == 1:
                count = flop_registry.get(func.overloadpacket, _count_without_formula)
                self.counts.append(count(*args, **kwargs or {}, out_val=output))
        tensors = tensors_in((args, kwargs))
        if tensors and all(id(each) in self.weights for each in tensors):
            self.weights |= {id(each): each for each in tensors_in(output)}
        return output


def _count_without_formula(first: Tensor, second: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of a matrix times a vector, or of `[N, D]` times a weight `[D_out, D, E]` times `[N, E]`."""
    return 2 * (first.numel() if second.ndim == 1 else len(first) * second.numel())


def whole_forward(network: nn.Module) -> Callable[[Any], Any]:
    """The forward pass to count: more than `forward` for a network whose heads run outside of it."""
    return getattr(network, "whole_forward", partial(run, network))


def meta_input(model: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Make a tensor without values for one image `[C, H, W]`, or of any shape with its batch axis, such as `[N, T]`."""
    shape = (1, *input_shape) if len(input_shape) == 3 else tuple(input_shape)
    return torch.empty(shape, dtype=torch.int64 if reads_tokens(model) else type_of(model), device="meta")


def count_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _product(module: nn.Module) -> Callable[..., int] | None:
    if own := getattr(module, "num_operations", None):
        return lambda m, args, outputs: own(args, outputs)
    match module:
        case LowRankLayer():
            return lambda m, _, out: 2 * out.numel() // m.out_features * m.num_weights
        case nn.Linear():
            return lambda m, _, out: 2 * out.numel() * m.weight.shape[1]
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
        case _ if rule == "full" and type(module).__name__ == "SelectiveScan":
            return lambda _, args, out: SCAN_OPS * out.numel() * args[2].shape[1]  # A is [channels, states]
    return None
