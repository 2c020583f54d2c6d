"""State of finetuning: what a checkpoint holds, and pivoted layers as plain factors."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from facts.decomposition.truncation import spectral_factors
from facts.finetuning.recipe import Finetuning
from facts.modules.forms import PivotedLinear, arithmetic_of, pivoted_layer
from facts.modules.linear_calls import replace_submodule
from facts.modules.lowrank import LowRankLinear
from facts.utils.cache import optimizer_tensors, restore_optimizer


class State:
    """Student, AdamW, loss scale, numbers of `steps` done and planned, and `totals` [epochs, 2] of loss and samples.

    `errors` holds the errors measured so far, `best` the weights with the smallest one, `seconds` the time of all work
    up to the last checkpoint. Random draws have no state: each batch has its own seed.
    """

    def __init__(self, student: nn.Module, recipe: Finetuning, total_steps: int):
        self.student = student
        # DeiT's groups: biases, norms and the parameters that the network itself lists do not decay.
        self.optimizer = create_optimizer_v2(
            student, "adamw", lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        if recipe.backbone_scale != 1:
            self._slow_down(student.backbone, recipe.backbone_scale)
        device = next(student.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "float16")
        self.steps, self.total_steps = 0, total_steps
        self.totals = torch.zeros(recipe.num_epochs, 2, dtype=torch.float64)
        self.seconds = self.seconds_to_validate = self.seconds_to_save = 0.0
        self.errors: list[float] = []
        self.best: dict[str, Tensor] = {}

    def _slow_down(self, part: nn.Module, scale: float) -> None:
        """Put the part's parameters into groups whose rate timm's schedules multiply by `lr_scale`."""
        own = set(part.parameters())
        for group in list(self.optimizer.param_groups):
            slow = [parameter for parameter in group["params"] if parameter in own]
            group["params"] = [parameter for parameter in group["params"] if parameter not in own]
            self.optimizer.add_param_group({**group, "params": slow, "lr_scale": scale})

    def note_error(self, error: float) -> None:
        """Record an error, and keep the weights if it is the smallest so far."""
        error = math.inf if math.isnan(error) else error
        if not self.errors or error < min(self.errors):
            self.best = {name: tensor.detach().clone() for name, tensor in self._weights().items()}
        self.errors.append(error)

    @torch.no_grad()
    def take_best(self) -> None:
        """Give the student the weights with the smallest error, if any was recorded."""
        for name, tensor in self._weights().items() if self.best else ():
            tensor.data = self.best[name].clone()  # an expanded buffer cannot be written

    def tensors(self) -> dict[str, Tensor]:
        return {
            **{f"student/{name}": tensor.detach() for name, tensor in self._weights().items()},
            **{f"adamw/{name}": tensor for name, tensor in optimizer_tensors(self.optimizer).items()},
            **{f"scaler/{key}": torch.tensor(value) for key, value in self.scaler.state_dict().items()},
            **{f"best/{name}": tensor for name, tensor in self.best.items()},
            "steps": torch.tensor([self.steps, self.total_steps]),
            "totals": self.totals,
            "seconds": torch.tensor(
                [self.seconds, self.seconds_to_validate, self.seconds_to_save], dtype=torch.float64
            ),
            "errors": torch.tensor(self.errors, dtype=torch.float64),
        }

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self._weights().items():
            tensor.data = tensors[f"student/{name}"].to(tensor)
            if f"best/{name}" in tensors:
                self.best[name] = tensors[f"best/{name}"].to(tensor.device)
        restore_optimizer(self.optimizer, _below("adamw/", tensors))
        if scaler := {key: tensor.item() for key, tensor in _below("scaler/", tensors).items()}:
            self.scaler.load_state_dict(scaler)
        self.steps, self.total_steps = tensors["steps"].tolist()
        self.seconds, self.seconds_to_validate, self.seconds_to_save = tensors["seconds"].tolist()
        self.totals, self.errors = tensors["totals"], tensors["errors"].tolist()

    def _weights(self) -> dict[str, Tensor]:
        """Parameters and buffers, each once: some networks register one under several names."""
        return {**dict(self.student.named_parameters()), **dict(self.student.named_buffers())}


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@contextmanager
def plain_factors(model: nn.Module) -> Iterator[None]:
    """Replace every pivoted layer by two factors within the block, and the factors by a pivoted layer afterwards.

    Both forms reach the same weights, but a small step of a pivot or a coefficient can be a large step of the weight.
    If the pivots were permuted, new ones are chosen for half precision again. After an error the factors remain.
    """
    pivoted = {name: module for name, module in model.named_modules() if isinstance(module, PivotedLinear)}
    for name, layer in pivoted.items():
        replace_submodule(model, name, _balanced(layer))
    yield
    for name, layer in pivoted.items():
        factors = model.get_submodule(name)
        assert isinstance(factors, LowRankLinear)
        precision = torch.float32 if layer.order is None else torch.bfloat16
        arithmetic = arithmetic_of(factors.left, precision)
        pivots = pivoted_layer(factors.left, factors.right, factors.bias, arithmetic=arithmetic)
        replace_submodule(model, name, pivots)


@torch.no_grad()
def _balanced(layer: PivotedLinear) -> LowRankLinear:
    """The same weight as two factors with equal singular values."""
    left, right = spectral_factors(*(factor.double() for factor in layer.factors()), share=0.5)
    return LowRankLinear(left.to(layer.basis), right.to(layer.basis), layer.bias)
