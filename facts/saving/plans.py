"""Networks with the empty low-rank layers of a plan, for the tensors of a file."""

from torch import nn

from facts.modules.linear_calls import replace_submodule, with_linear_layers
from facts.modules.lowrank import LowRankLinear
from facts.modules.pointwise import is_pointwise
from facts.search import Plan


def with_plan(dense: nn.Module, plan: Plan) -> nn.Module:
    """Replace layers by empty low-rank ones as planned, 1x1 convolutions included, under all names of each layer.

    Raises `ValueError` for a layer that is missing or not linear, and for a rank that it cannot have.
    """
    modules = dict(dense.named_modules())
    convolutions = {name.removesuffix(".linear") for name in plan if name.endswith(".linear")}
    convolutions = {name for name in convolutions if name in modules and is_pointwise(modules[name])}
    model = with_linear_layers(dense, [name for name in convolutions if plan[f"{name}.linear"] is not None])
    modules = dict(model.named_modules())
    for name, rank in plan.items():
        if name.removesuffix(".linear") in convolutions and rank is None:
            continue
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            found = "there is none of that name" if layer is None else f"it is of type {type(layer).__name__}"
            raise ValueError(
                f"the plan does not fit this {type(model).__name__}: {name!r} is no linear layer ({found}); load the "
                "network that was compressed"
            )
        largest = min(layer.in_features, layer.out_features)
        if rank is not None and rank > largest:
            raise ValueError(
                f"the plan does not fit this {type(model).__name__}: rank {rank} of {name!r}, which is "
                f"{layer.out_features} x {layer.in_features}, may be {largest} at most; load the network that was "
                "compressed"
            )
        if rank is not None:
            left, right = (
                layer.weight.new_empty(layer.out_features, rank),
                layer.weight.new_empty(rank, layer.in_features),
            )
            replace_submodule(model, name, LowRankLinear(left, right, layer.bias))
    return model
