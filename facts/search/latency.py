"""How long a layer takes at a rank, measured on the device at hand."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.benchmark import Timer

from facts import parallel
from facts.lowrank import LowRankLinear

MIN_SECONDS = 0.02


class LayerTimes:
    """Median seconds of one forward pass of a layer, dense (None) or at a rank, on as many vectors as it sees.

    `rows` are those of one batch. Layers of one shape and rank are measured once.
    """

    def __init__(self, layers: Mapping[str, nn.Linear], rows: Mapping[str, int]):
        self.layers, self.rows = layers, rows
        self.known: dict[tuple, float] = {}

    def __call__(self, name: str, rank: int | None) -> float:
        layer = self.layers[name]
        key = (layer.in_features, layer.out_features, layer.bias is None, self.rows[name], rank)
        if key not in self.known:
            self.known[key] = parallel.from_main(lambda: self._measure(layer, self.rows[name], rank))
        return self.known[key]

    @staticmethod
    @torch.no_grad()
    def _measure(layer: nn.Linear, rows: int, rank: int | None) -> float:
        if rank is not None:
            weight = layer.weight
            left, right = weight.new_ones(layer.out_features, rank), weight.new_ones(rank, layer.in_features)
            layer = LowRankLinear(left, right, layer.bias)
        inputs = next(layer.parameters()).new_ones(rows, layer.in_features)
        timer = Timer("layer(inputs)", globals={"layer": layer, "inputs": inputs}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=MIN_SECONDS).median
