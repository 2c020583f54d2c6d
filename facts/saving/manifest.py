"""The manifest of a saved network, `compression.json`, and checks of its types."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from facts.modules.pivoted import Layout
from facts.result import Summary
from facts.utils.version import __version__

WEIGHTS, MANIFEST, LOADER = "model.safetensors", "compression.json", "load_without_facts.txt"

Finite = Annotated[float, Field(allow_inf_nan=False)]
SHA256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Metrics = dict[str, dict[Literal["original", "compressed"], Finite]]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Manifest:
    """Instructions to build the network (`recipe`, `plan`), its provenance, and its summary.

    `fingerprint` is the SHA-256 of the weight file, `versions` the libraries' versions. `base_model` holds, as far as
    known, the original's `name` and `repository`, and its weight file (`source`, `sha256`). `buffers` holds the types
    of unsaved buffers that are not float32, `layouts` the layouts of pivoted layers. `checksum` is the SHA-256 of this
    file without the checksum; older files have none.
    """

    recipe: dict[str, Any] | None
    plan: dict[str, Annotated[int, Field(ge=1)] | None]
    fingerprint: SHA256
    versions: dict[str, Annotated[str, Field(pattern=r"^\d+\.\d")]]
    summary: Summary
    skipped: dict[str, str]
    base_model: dict[str, str] | None
    metrics: Metrics | None
    buffers: dict[str, Literal["F64", "F16", "BF16"]] = Field(default_factory=dict)
    layouts: dict[str, Layout] = Field(default_factory=dict)
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

    def text(self) -> str:
        """Render JSON that ends with its own checksum."""
        text = json.dumps({**asdict(self), "checksum": ""}, indent=1)
        before, after = text.rsplit('""', 1)
        return f'{before}"{hashlib.sha256(text.encode()).hexdigest()}"{after}'


def first_fault(error: ValidationError) -> str:
    """Location and message of the first error that pydantic found."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]
