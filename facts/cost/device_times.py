"""Times of a network on a device, in a file with which another machine allocates ranks."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Self

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import nn

from facts.cost.count import Cost
from facts.cost.latency import Shape, Times
from facts.modules.forms import FormName
from facts.utils.files import replacing
from facts.utils.options import Count

Seconds = Annotated[float, Field(gt=0, le=86_400)]  # of a pass; more than a day cannot be right


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class LayerTimes:
    """Seconds that a layer takes in one pass, dense and by rank; it multiplies `rows` vectors for one sample."""

    d_in: Count
    d_out: Count
    bias: bool
    rows: Count
    dense: Seconds
    by_rank: Annotated[dict[Count, Seconds], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class DeviceTimes:
    """Seconds of a network for a batch of `batch_size`, and of its layers within it, on a `device`.

    `network` is its name; its `flops` for one sample (None if unknown) and its `params` identify it. `facts.measure`
    makes one.
    """

    device: str
    threads: Count
    torch: str
    precision: str
    form: FormName
    network: str
    flops: int | None
    params: Count
    batch_size: Count
    dense: Seconds
    layers: Annotated[list[LayerTimes], Field(min_length=1)]

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read a file that `write` wrote. Raises an `OSError` if it is missing, `ValueError` for other files."""
        try:
            return TypeAdapter(cls).validate_json(Path(path).read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
            raise ValueError(f"{path} is not from `facts measure` ({where}): measure again on the device") from error

    def write(self, path: Path | str) -> None:
        with replacing(Path(path)) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1))

    @property
    def times(self) -> dict[Shape, Times]:
        """Seconds of the measured layers, by shape and rank."""
        return {
            Shape(layer.d_in, layer.d_out, layer.bias, layer.rows): dict([(None, layer.dense), *layer.by_rank.items()])
            for layer in self.layers
        }

    def refuse_other(self, form: FormName, precision: str) -> None:
        """Raises `ValueError` unless low-rank layers of this form were measured, in this precision."""
        for what, measured, wanted in (("form", self.form, form), ("precision", self.precision, precision)):
            if measured != wanted:
                raise ValueError(
                    f"the device times of {self.device} are for {what} {measured}, but {wanted} is wanted: use "
                    f"{measured}, or measure {wanted} on the device"
                )

    def refuse_other_network(self, cost: Cost) -> None:
        """Raises `ValueError` unless a network of this cost for one sample was measured."""
        if (cost.flops, cost.params) != (self.flops, self.params):
            raise ValueError(
                f"the device times of {self.device} are for {self.network} ({_words(self.flops, self.params)}), not "
                f"for this network ({_words(cost.flops, cost.params)}): measure this one there, on inputs of this size"
            )


def precision_name(model: nn.Module, precision: torch.dtype) -> str:
    """Name of the type of a network's products: autocast's, or that of its weights."""
    own = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return str(own if precision == torch.float32 else precision).removeprefix("torch.")


def _words(flops: int | None, params: int) -> str:
    return f"{'unknown' if flops is None else f'{flops:,}'} FLOPs, {params:,} parameters"
