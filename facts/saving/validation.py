"""Validation of a folder from someone else: it must hold only data, and nothing that leads out of it."""

import itertools
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from facts.saving.manifest import MANIFEST

KINDS = (
    *(".json", ".safetensors", ".md", ".txt", ".jinja", ".onnx", ".data"),  # `.data`: large weights of an ONNX file
    *(".gif", ".jpeg", ".jpg", ".png", ".webp"),
)
NAMES = ("LICENSE", "NOTICE", ".gitattributes")
HIDDEN = (".git", ".cache")  # folders of git and of Hugging Face's hub, which are never read
CODE = re.compile(b"\x80[\x02-\x05]|PK\x03\x04|\x7fELF")  # how pickles, archives (PyTorch's pickles) and programs begin
SETTINGS = ("config.json", "map.json")  # name endings of the files that transformers reads
REFERENCES = re.compile("auto_map|custom_generate|init_inputs|fast_tokenizer_files|.*_(file|path|dir)")  # their keys
MOST_PARSED = 2**22  # bytes of a JSON file that is parsed here, which takes thirteen times as much memory
MOST_JSON = 2**27  # bytes of any other; the largest tokenizers have a quarter of that
MOST_BUFFERS = 2**26  # bytes of tensors that no file holds, beyond the size of the file


def refuse_what_is_not_data(folder: Path) -> None:
    """Raises `ValueError` with the first file of `folder` that is not data, is too large, or leads out of it."""
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in sorted(folders + files)):
            if fault := _link(path, folder) or _more_than_data(path) or _reference(path):
                raise ValueError(f"{path} {fault}")
        folders[:] = sorted(name for name in folders if name not in HIDDEN)


def _link(path: Path, folder: Path) -> str | None:
    """Say where a link leads out of the folder; links in Hugging Face's cache to the repository's blobs are fine."""
    home, target = folder.resolve(), Path(os.path.realpath(path))  # which leaves circular links unresolved
    cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if not path.is_symlink() or target.is_relative_to(home) or cached:
        return None
    return f"is a link to {target}, outside of the folder: put the file itself there"


def _more_than_data(path: Path) -> str | None:
    if path.is_dir():
        return None
    if not path.is_file():
        return "is not a regular file: remove it"
    most = MOST_PARSED if path.name.endswith((MANIFEST, *SETTINGS)) else MOST_JSON
    if path.suffix.lower() == ".json" and path.stat().st_size > most:
        return f"has {path.stat().st_size:,} bytes, but only {most:,} are allowed: fetch it again"
    # A killed writer leaves `.model.safetensors.x1y2z3`.
    name = path.name[1:].rpartition(".")[0] if path.name.startswith(".") else path.name
    with path.open("rb") as file:
        is_code = CODE.match(file.read(4))
    if not is_code and (path.name in NAMES or Path(name).suffix.lower() in KINDS):
        return None
    fault = "is a pickle, an archive or a program" if is_code else "has an unknown file type"
    return f"{fault}: a saved network is JSON, safetensors, text and images. Remove the file if you trust the rest"


def _reference(path: Path) -> str | None:
    """Say which setting would make transformers read other files or run code."""
    if not path.name.endswith(SETTINGS):
        return None
    try:
        settings = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error}): save or fetch it again"
    if not isinstance(settings, dict):
        return "is not a JSON object: save or fetch it again"
    named = [name for name, value in settings.items() if value is not None and REFERENCES.fullmatch(name)]
    return f"sets {named[0]}, which would read other files or run code: remove it" if named else None


@contextmanager
def bounded_parameters(most: int) -> Iterator[None]:
    """Raises `ValueError` within the block once networks have more than `most` parameters.

    Otherwise it would take minutes to build 100,000 layers, which take no memory on the meta device, before a refusal.
    """
    numbers = itertools.count(1)

    def register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if next(numbers) > most:
            raise ValueError(f"it has more than {most} parameters, many more than the saved weights have")

    hook = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        hook.remove()


def refuse_large_buffers(sketch: nn.Module, size_of_file: int) -> None:
    """Raises `ValueError` for a network on the meta device whose buffers would take far more than its weights."""
    size = sum(buffer.nbytes for buffer in sketch.buffers())
    if size > MOST_BUFFERS + size_of_file:
        raise ValueError(f"{type(sketch).__name__} would need {size / 2**30:.1f} GiB for tensors that no file holds")
