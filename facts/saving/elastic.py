"""The file `elastic.json`, and how decompositions are stored beside it.

Of hidden units only the triangle of the right factor is stored; with the weight it gives the left factor (`undone`).
"""

from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from facts.decomposition.elimination import undone
from facts.decomposition.layers import packed, unpacked
from facts.decomposition.parts import HiddenUnit, Part, PartsName
from facts.decomposition.truncation import Decomposition
from facts.modules.forms import FormName
from facts.modules.lowrank import LinearLayer
from facts.saving.manifest import SHA256, Finite, first_fault

ELASTIC, DECOMPOSITIONS = "elastic.json", "elastic.safetensors"
MOST_SECONDS = 600  # of the solver
MOST_DESCRIBED = 2**24  # bytes of the description; a network of 10 billion parameters takes a few million

Count = Annotated[int, Field(ge=1, le=2**31)]
Error = Annotated[Finite, Field(ge=-1e30, le=1e30)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Elastic:
    """Content of `elastic.json`.

    `errors` are those of each part at the ranks on offer (None for dense); their sum predicts the distance of the
    outputs if there is a `curve`, which holds it at some ratios of the FLOPs. `rows` are the vectors that each layer
    multiplies per sample, `kinds` those of the units by the modules that hold them. `input_shape` is that of one
    sample, with its batch axis, if it is a tensor, of integers if `reads_integers`. `weights` and `decompositions` are
    the SHA-256 of both weight files.
    """

    parts: PartsName
    form: FormName
    precision: Literal["float32", "bfloat16", "float16", "float64"]
    time_limit: Annotated[Finite, Field(gt=0, le=MOST_SECONDS)]
    fit_bias: bool
    input_shape: tuple[Count, ...] | None
    reads_integers: bool
    rows: dict[str, Annotated[int, Field(ge=0, le=2**40)]]
    kinds: dict[str, Literal["products", "outputs", "hidden"]]
    errors: dict[str, tuple[tuple[Count | None, Error], ...]]
    curve: tuple[tuple[Finite, Finite], ...]
    weights: SHA256
    decompositions: SHA256

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file. Raises `FileNotFoundError` if there is none, `ValueError` if it is damaged."""
        path = folder / ELASTIC
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds a network for one budget only: facts.save_elastic writes any")
        if path.stat().st_size > MOST_DESCRIBED:
            raise ValueError(f"{path} has more than {MOST_DESCRIBED:,} bytes: save or fetch it again")
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{path} is damaged ({first_fault(error)}); save or fetch it again") from error

    def text(self) -> str:
        return TypeAdapter(Elastic).dump_json(self).decode()


def stored(name: str, part: Part, decomposition: Decomposition) -> dict[str, Tensor]:
    """The tensors to store for a decomposition."""
    tensors = packed(name, decomposition)
    if isinstance(part, HiddenUnit):
        del tensors[f"{name}/left"]
        triangle = decomposition.right[:, decomposition.order]
        tensors[f"{name}/right"] = triangle[_below(len(triangle))]
    return tensors


def restored(name: str, layer: LinearLayer, part: Part, tensors: dict[str, Tensor]) -> Decomposition:
    """The decomposition of a layer from stored tensors. Raises `ValueError` for values that it cannot have."""
    found = {key: tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}
    if isinstance(part, HiddenUnit):
        order, size = found[f"{name}/order"], part.width
        if not order.sort().values.equal(torch.arange(size)):
            raise ValueError(f"{name}/order is not a permutation")
        values = found[f"{name}/right"]
        triangle = torch.eye(size, dtype=values.dtype)
        triangle[_below(size)] = values
        right = torch.zeros_like(triangle)
        right[:, order] = triangle
        found |= {f"{name}/right": right, f"{name}/left": undone(layer.weight.detach(), right, order)}
    if not all(tensor.isfinite().all() for tensor in found.values()):
        raise ValueError(f"{name} holds NaN or infinity")
    return unpacked(found, name)


def _below(size: int) -> Tensor:
    """Mask `[size, size]` of the values below the diagonal."""
    return torch.ones(size, size, dtype=torch.bool).tril(-1)
