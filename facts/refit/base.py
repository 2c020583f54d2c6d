"""Refits: once ranks are chosen, layers are fitted again in the order in which they run."""

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from facts.calibration.prepare import Calibration
from facts.decomposition.apply import Plan, low_rank_layer
from facts.decomposition.truncation import Decomposition
from facts.estimators.base import Estimator
from facts.modules.forms import Form
from facts.modules.linear_calls import copy_with, replace_submodule
from facts.modules.modes import autocast, evaluating
from facts.modules.networks import run
from facts.moments.checkpointing import blocks_of
from facts.utils.batches import to_device
from facts.utils.options import options

log = logging.getLogger(__name__)


@dataclass
class RefitProblem:
    """A plan, and a `network` whose earlier layers are already compressed, with refitted `decompositions`."""

    calibration: Calibration
    estimator: Estimator
    plan: Plan
    decompositions: dict[str, Decomposition]
    form: Form
    network: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.network = copy_with(self.calibration.model)

    def layers(self, names: list[str]) -> dict[str, nn.Linear]:
        """Layers of the network, by name, that are still the original ones."""
        return {name: self.network.get_submodule(name) for name in names}  # type: ignore[misc]

    def weight(self, name: str) -> Tensor:
        """A layer's original weight in float64."""
        return self.calibration.layers[name].weight.detach().double()

    def rank(self, name: str) -> int:
        rank = self.plan[name]
        assert rank is not None
        return rank

    def truncated(self, name: str) -> Decomposition:
        """A layer's decomposition, truncated to its rank."""
        decomposition, rank = self.decompositions[name], self.rank(name)
        left, right = decomposition.truncate(rank)
        return replace(decomposition, left=left, right=right, energies=decomposition.energies[:rank])

    def put(self, decompositions: dict[str, Decomposition]) -> None:
        """Put low-rank layers into the network."""
        self.decompositions |= decompositions
        precision = self.calibration.execution.precision
        for name, decomposition in decompositions.items():
            dense = self.calibration.layers[name]
            layer = low_rank_layer(dense, decomposition, self.rank(name), self.form, precision)
            replace_submodule(self.network, name, layer)


@options
class Refit(ABC):
    """A way to fit low-rank layers to a network whose earlier layers are already compressed.

    It goes from block to block, or from layer to layer if not `by_block`.
    """

    by_block: ClassVar[bool] = True
    fits_bias: ClassVar[bool] = False

    @abstractmethod
    def refitted(self, problem: RefitProblem, names: list[str]) -> dict[str, Decomposition]:
        """Compute decompositions of the next layers, for their ranks in the plan."""

    def check(self, fit_bias: bool, has_data: bool = True, has_units: bool = False) -> None:
        """Raise `ValueError` for units, without data, or if biases are to be fitted and this refit cannot fit them."""
        if has_units:
            raise ValueError("a refit fits layers, but units were chosen: leave it out")
        name = type(self).__name__
        if not has_data:
            raise ValueError(f"{name} runs the network on calibration data: give some, or no refit")
        if fit_bias and not self.fits_bias:
            raise ValueError(f"{name} does not fit biases: choose fit_bias=False with it, or the refit blockwise")

    def fit(self, problem: RefitProblem) -> dict[str, Decomposition]:
        """Fit all layers of a plan in the order in which they run."""
        groups = in_order(problem.calibration, problem.plan, self.by_block)
        for number, names in enumerate(groups, start=1):
            log.info("refit %d of %d: %s", number, len(groups), ", ".join(names))
            problem.put(self.refitted(problem, names))
        return problem.decompositions


def in_order(calibration: Calibration, plan: Plan, by_block: bool) -> list[list[str]]:
    """List the names of the low-rank layers in the order in which they first run, one group per block or layer."""
    names = {calibration.layers[name]: name for name, rank in plan.items() if rank is not None}
    blocks = blocks_of(calibration.model, names) if by_block else []
    owners = dict(zip(names, names, strict=True)) | {layer: block for block in blocks for layer in block.modules()}
    groups: defaultdict[nn.Module, dict[str, None]] = defaultdict(dict)
    model, precision = calibration.model, calibration.execution.precision
    device = next(model.parameters()).device
    with ExitStack() as stack:
        for layer in names:
            hook = layer.register_forward_pre_hook(lambda layer, _: groups[owners[layer]].setdefault(names[layer]))
            stack.callback(hook.remove)
        with torch.no_grad(), evaluating(model), autocast(device, precision):
            run(model, to_device(calibration.first_inputs, device))
    return [list(group) for group in groups.values()]
