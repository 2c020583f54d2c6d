"""Descriptions in saved folders, `compression.json` and `elastic.json`, and checks of their types."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from facts.modules.forms import FormName, Layout
from facts.parts.base import Description
from facts.result import Summary
from facts.saving.structure import FLOATS
from facts.utils.version import __version__

WEIGHTS, MANIFEST, LOADER = "model.safetensors", "compression.json", "load_without_facts.txt"

Finite = Annotated[float, Field(allow_inf_nan=False)]
SHA256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Metrics = dict[str, dict[Literal["original", "compressed"], Finite]]

ELASTIC, DECOMPOSITIONS = "elastic.json", "elastic.safetensors"
MOST_SECONDS = 600  # of the solver
MOST_DESCRIBED = 2**24  # bytes of the description; a network of 10 billion parameters takes a few million

Count = Annotated[int, Field(ge=1, le=2**31)]
Error = Annotated[Finite, Field(ge=-1e30, le=1e30)]
GROUPS = ("costs", "method", "quality")


def as_summary(found: Any) -> Summary:
    """Read a summary, also one by earlier code, whose fields are in three groups."""
    if isinstance(found, dict) and all(isinstance(found.get(name), dict) for name in GROUPS):
        found = {field: value for name in GROUPS for field, value in found[name].items()}
    return TypeAdapter(Summary).validate_python(found)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Manifest:
    """Instructions to build the network (`recipe`, `plan`), its provenance, and its summary.

    `fingerprint` is the SHA-256 of the weight file, `versions` the libraries' versions. `base_model` holds, as far as
    known, the original's `name` and `repository`, and its weight file (`source`, `sha256`). `buffers` holds the types
    of unsaved buffers that are not float32, `layouts` the layouts of pivoted layers, `described` the
    `facts.parts.descriptions` of parts. `checksum` is the SHA-256 of this
    file without the checksum; older files have none.
    """

    recipe: dict[str, Any] | None
    plan: dict[str, Annotated[int, Field(ge=1)] | None]
    fingerprint: SHA256
    versions: dict[str, Annotated[str, Field(pattern=r"^\d+\.\d")]]
    summary: Annotated[Summary, BeforeValidator(as_summary)]
    skipped: dict[str, str]
    base_model: dict[str, str] | None
    metrics: Metrics | None
    buffers: dict[str, Literal[*FLOATS]] = Field(default_factory=dict)  # type: ignore[valid-type]
    layouts: dict[str, Layout] = Field(default_factory=dict)
    described: dict[str, Description] = Field(default_factory=dict)
    checksum: SHA256 | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a manifest. Raises `FileNotFoundError` if there is none, `ValueError` if it is damaged or too new."""
        path = folder / MANIFEST
        try:
            data = path.read_bytes()
            manifest = TypeAdapter(cls).validate_json(data)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{folder} holds no {MANIFEST}; give one that save_compressed wrote") from error
        except ValidationError as error:
            raise ValueError(f"{path} is damaged ({first_fault(error)}); save or fetch it again") from error
        if (known := manifest.checksum) and known != hashlib.sha256(data.replace(known.encode(), b"")).hexdigest():
            raise ValueError(
                f"{path} is damaged (different SHA-256); save or fetch it again, or delete `checksum` if you edited it"
            )
        theirs = manifest.versions.get("facts", __version__)
        if int(theirs.partition(".")[0]) > int(__version__.partition(".")[0]):
            raise ValueError(f"{path} was written by facts {theirs}, but this is {__version__}: pip install -U facts")
        return manifest

    @staticmethod
    def metrics_of(given: Any) -> Metrics | None:
        """Check metrics. Raises `ValueError` for others than finite numbers by name."""
        try:
            return TypeAdapter(Metrics | None).validate_python(given)
        except ValidationError as error:
            example = '{"top1": {"original": 72.1, "compressed": 70.3}}'
            raise ValueError(f"metrics must be finite numbers, like {example} ({first_fault(error)})") from error

    def text(self) -> str:
        """Render JSON that ends with its own checksum."""
        text = json.dumps({**asdict(self), "checksum": ""}, indent=1)
        before, after = text.rsplit('""', 1)
        return f'{before}"{hashlib.sha256(text.encode()).hexdigest()}"{after}'


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Elastic:
    """Content of `elastic.json`.

    `errors` are those of each part at the ranks on offer (None for dense); their sum predicts the distance of the
    outputs if there is a `curve`, which holds it at some ratios of the FLOPs. `rows` are the vectors that each part's
    last layer multiplies per sample. `input_shape` is that of one sample, with its batch axis, if it is a tensor, of
    integers if `reads_integers`. `weights` and `decompositions` are the SHA-256 of both weight files. `information` is
    the mean in the original's outputs, if it is known.
    """

    parts: str
    form: FormName
    precision: Literal["float32", "bfloat16", "float16", "float64"]
    time_limit: Annotated[Finite, Field(gt=0, le=MOST_SECONDS)]
    input_shape: tuple[Count, ...] | None
    reads_integers: bool
    rows: dict[str, Annotated[int, Field(ge=0, le=2**40)]]
    errors: dict[str, tuple[tuple[Count | None, Error], ...]]
    curve: tuple[tuple[Finite, Finite], ...]
    weights: SHA256
    decompositions: SHA256
    described: dict[str, Description] = Field(default_factory=dict)
    information: Finite | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file. Raises `FileNotFoundError` if there is none, `ValueError` if it is damaged."""
        path = folder / ELASTIC
        if not path.is_file():
            ways = "`facts compress --elastic` or facts.save_elastic"
            raise FileNotFoundError(f"{folder} was saved for one budget; {ways} saves for all")
        if path.stat().st_size > MOST_DESCRIBED:
            raise ValueError(f"{path} has more than {MOST_DESCRIBED:,} bytes: save or fetch it again")
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{path} is damaged ({first_fault(error)}); save or fetch it again") from error

    def text(self) -> str:
        return TypeAdapter(Elastic).dump_json(self).decode()


def first_fault(error: ValidationError) -> str:
    """Location and message of the first error that pydantic found."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]
