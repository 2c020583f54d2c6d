"""A pretended GPU, for machines without one: tensors say that they lie on `cuda`, with their values on the CPU.

As on a GPU, an operation on tensors of two devices is an error, unless one is a single number or an index, and so is a
view of values by NumPy.
"""

import functools
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
HEALTH = "_accelerator_graph_capture_health_check"
MAKERS = ["arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"]


class OnCuda(Tensor):
    device, is_cuda = CUDA, True

    @staticmethod
    def __new__(cls, values):
        options = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        tensor = Tensor._make_wrapper_subclass(cls, values.shape, **options)
        tensor.values = values
        return tensor

    def __deepcopy__(self, memo):
        other = memo[id(self)] = OnCuda(self.values.detach().clone()).requires_grad_(self.requires_grad)
        other._is_param = getattr(self, "_is_param", False)
        return other

    def new_tensor(self, data, **options):
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA, **options})

    def numpy(self, **options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        indexed = func in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default)
        if func not in (aten._to_copy.default, aten.copy_.default):
            for leaf in tree_leaves(((args[0], *args[2:]) if indexed else args, kwargs)):
                if isinstance(leaf, Tensor) and not isinstance(leaf, OnCuda) and leaf.ndim:
                    raise RuntimeError(f"{func}: expected all tensors on one device, found {list(leaf.shape)} on cpu")
        found = func(*values_of(args), **values_of(kwargs))
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            return found
        found = tree_map_only(Tensor, lambda each: each if isinstance(each, OnCuda) else OnCuda(each), found)
        return return_and_correct_aliasing(func, args, kwargs, found)


for name in ("quantile", "tolist", "data_ptr", "untyped_storage"):  # those that PyTorch does not dispatch
    own = getattr(Tensor, name)
    setattr(OnCuda, name, lambda self, *args, own=own: tree_map_only(Tensor, OnCuda, own(self.values, *args)))


def values_of(tree):
    return tree_map_only(OnCuda, lambda tensor: tensor.values, tree)


def moved(method, tensor, *rest, **kwargs):
    target, dtype = {"cpu": torch.device("cpu"), "cuda": CUDA}.get(method.__name__, tensor.device), None
    for each in (*rest, kwargs.get("device"), kwargs.get("dtype")):
        target = torch.device(each) if isinstance(each, str | torch.device) else getattr(each, "device", target)
        dtype = each if isinstance(each, torch.dtype) else getattr(each, "dtype", dtype)
    if target.type == "meta":
        return method(values_of(tensor), *rest, **kwargs)
    if isinstance(tensor, OnCuda) != (target.type == "cuda"):
        tensor = OnCuda(tensor.detach().clone()) if target.type == "cuda" else tensor.values.detach().clone()
    return tensor if dtype in (None, tensor.dtype) else tensor.type(dtype)


def made(function, *args, device=None, **kwargs):
    if device is None or torch.device(device).type != "cuda":
        return function(*args, **kwargs, **({} if device is None else {"device": device}))
    tensor = function(*values_of(args), **kwargs)
    return OnCuda(tensor.detach()).requires_grad_(tensor.requires_grad)


def replaced(owner, name, of):
    own = getattr(owner, name)
    return patch.object(owner, name, functools.wraps(own)(lambda *args, **kwargs: of(own, *args, **kwargs)))


def enter_no_grad(mode):
    """In place of inference mode, whose tensors take no wrapper."""
    mode.other = torch.no_grad()
    mode.other.__enter__()


@contextmanager
def pretended_cuda():
    """Nothing is pretended where there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    functions = {
        "mem_get_info": lambda device=None: (2**34, 2**34),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "device_of": lambda tensor: nullcontext(),
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
    }
    leave = {"__enter__": enter_no_grad, "__exit__": lambda mode, *error: mode.other.__exit__(*error)}
    patches = [replaced(torch, name, made) for name in MAKERS]
    patches += [replaced(Tensor, name, moved) for name in ("to", "cpu", "cuda")]
    patches += [patch.multiple(torch.cuda, **functions), patch.multiple(torch.inference_mode, **leave)]
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # modules get new parameters, not new values
    patches.append(patch.object(torch, "Generator", lambda device=None, own=torch.Generator: own()))
    with ExitStack() as stack, patch.object(torch.optim.Optimizer, HEALTH, lambda self: None, create=True):
        for each in patches:
            stack.enter_context(each)
        yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)
