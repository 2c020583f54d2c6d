"""A GPU that is not there: tensors that say they lie on `cuda`, with their values on the CPU.

Everything runs, with its real values. As on a GPU, an operation on tensors of two devices is an error, unless one is a
single number of the CPU or an index, and so is a view of values by NumPy. What would wait for the device is counted.
"""

import copy
import functools
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
}
MAKERS = [
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
]
waits: Counter[str] = Counter()


class OnCuda(Tensor):
    """Values on the CPU under the name of the GPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "OnCuda":
        tensor = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype
        )
        tensor.values = values
        return tensor

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict) -> "OnCuda":
        if id(self) not in memo:
            other = OnCuda(self.values.detach().clone()).requires_grad_(self.requires_grad)
            other._is_param = getattr(self, "_is_param", False)
            memo[id(self)] = other
        return memo[id(self)]

    def __repr__(self) -> str:
        return f"OnCuda({self.values!r})"

    def new_tensor(self, data: Any, **options: Any) -> "OnCuda":
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA, **options})

    def quantile(self, *arguments: Any, **options: Any) -> "OnCuda":
        return OnCuda(self.values.quantile(*arguments, **options))  # it makes tensors of its own on its device

    def tolist(self) -> Any:
        waits["tolist"] += 1
        return self.values.tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITS:
            waits[str(func)] += 1
        if func not in COPIES:
            refuse_mixtures(func, args, kwargs)
        found = func(*values_of(args), **values_of(kwargs))
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            return found
        found = tree_map_only(Tensor, lambda tensor: tensor if isinstance(tensor, OnCuda) else OnCuda(tensor), found)
        return return_and_correct_aliasing(func, args, kwargs, found)


def refuse_mixtures(func: Any, args: tuple, kwargs: dict) -> None:
    if func in INDEXED:
        args = (args[0], *args[2:])
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor) and not isinstance(tensor, OnCuda) and tensor.ndim:
            raise RuntimeError(f"{func}: expected all tensors on one device, found cuda:0 and cpu {list(tensor.shape)}")


def values_of(tree: Any) -> Any:
    return tree_map_only(OnCuda, lambda tensor: tensor.values, tree)


class Move(torch.autograd.Function):
    """From one device to the other, and gradients back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_cuda: bool) -> Tensor:
        ctx.to_cuda = to_cuda
        values = tensor.values if isinstance(tensor, OnCuda) else tensor
        return OnCuda(values.clone()) if to_cuda else values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return Move.apply(grad, not ctx.to_cuda), None


def moving(method: Any) -> Any:
    """A method of tensors that may bring them to another device."""
    return functools.wraps(method)(lambda *args, **kwargs: converted(method, args, kwargs))


def making(function: Any) -> Any:
    """A function that makes a tensor, on `cuda` too."""

    @functools.wraps(function)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        on_cuda = device is not None and torch.device(device).type == "cuda"
        made = function(*args, **kwargs) if device is None else function(*values_of(args), **kwargs, device="cpu")
        return OnCuda(made.detach()).requires_grad_(made.requires_grad) if on_cuda else made

    return make


def converted(method: Any, args: tuple, kwargs: dict) -> Tensor:
    tensor, rest = args[0], list(args[1:])
    target = {"cpu": torch.device("cpu"), "cuda": CUDA}.get(method.__name__, tensor.device)
    for each in (*rest, kwargs.get("device")):
        if isinstance(each, str | torch.device):
            target = torch.device(each)
        elif isinstance(each, Tensor):
            target = each.device
    dtype = next((each for each in (*rest, kwargs.get("dtype")) if isinstance(each, torch.dtype)), None)
    dtype = dtype or next((each.dtype for each in rest if isinstance(each, Tensor)), None)
    if isinstance(tensor, OnCuda) != (target.type == "cuda"):
        waits["to"] += target.type == "cpu" and not kwargs.get("non_blocking", False)
        tensor = Move.apply(tensor, target.type == "cuda")
    elif kwargs.get("copy"):
        tensor = tensor.clone()
    return tensor if dtype in (None, tensor.dtype) else tensor.type(dtype)


class Event:
    """One of CUDA, by the CPU's clock."""

    def __init__(self, enable_timing: bool = False):
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        waits["synchronize"] += 1

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later.time - self.time)


def nothing(*arguments: Any) -> None:
    pass


def enter_no_grad(mode: torch.inference_mode) -> None:
    """In place of inference mode, whose tensors take no wrapper."""
    mode.other = torch.no_grad()
    mode.other.__enter__()


def exit_no_grad(mode: torch.inference_mode, *error: Any) -> None:
    mode.other.__exit__(*error)


@contextmanager
def pretended_cuda(free: int = 2**34) -> Iterator[Counter[str]]:
    """Pretend that there is a GPU with so many free bytes; yields the counts of what would wait for it."""
    waits.clear()
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "mem_get_info": lambda device=None: (free, free),
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_name": lambda device=None: "pretended",
        "Event": Event,
        "is_bf16_supported": lambda including_emulation=True: including_emulation,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_device_capability": lambda device=None: (7, 5),  # without 2:4 sparsity
    }
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # modules get new parameters, not new values
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.multiple(torch.cuda, **functions))
            stack.enter_context(patch.multiple(torch, **{name: making(getattr(torch, name)) for name in MAKERS}))
            own = {name: moving(getattr(Tensor, name)) for name in ("to", "cpu", "cuda")}
            stack.enter_context(patch.multiple(Tensor, **own))
            stack.enter_context(patch.object(torch.backends.cudnn, "is_acceptable", lambda tensor: False))
            stack.enter_context(patch.multiple(torch.accelerator, synchronize=nothing, current_stream=nothing))
            stack.enter_context(
                patch.object(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", nothing, create=True)
            )
            stack.enter_context(patch.multiple(torch.inference_mode, __enter__=enter_no_grad, __exit__=exit_no_grad))
            yield waits
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def on_cuda(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the network there, tensors that two modules share still shared."""
    return copy.deepcopy(model).to("cuda")
