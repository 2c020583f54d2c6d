"""Hashes of content and code, and a cache of tensors in a folder, keyed by what they were computed from."""

import ast
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from facts.modules.networks import settings_of
from facts.utils import distributed
from facts.utils.files import locked, replacing, writable_folder

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[1]
# No result depends on these.
WITHOUT_RESULTS = ("__main__.py", "cli", "saving")
# Each file holds one method, and affects only that one.
METHODS = "methods"

CHECKSUM = "checksum"  # of names and tensors, in a file's metadata

_parsing = Lock()  # in Python 3.11, two threads that parse at once may fail


class Cache:
    """A folder of safetensors files, each with a checksum. Damaged files are dropped, to be computed again."""

    def __init__(self, folder: Path):
        self.folder = writable_folder(Path(folder))

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def load(self, name: str) -> dict[str, Tensor] | None:
        """Load tensors; None if there are none, if they are damaged, or if processes find different ones."""
        tensors, checksum = self._read(self._path(name)) or (None, None)
        return tensors if len(set(distributed.all_gather(checksum))) == 1 else None

    def _read(self, path: Path) -> tuple[dict[str, Tensor], str] | None:
        reason = "its checksum does not match"
        try:
            with safe_open(path, framework="pt") as file:
                tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
            checksum = content_key(dict(sorted(tensors.items())))
            if metadata and metadata.get(CHECKSUM) == checksum:
                return tensors, checksum
        except FileNotFoundError:
            return None
        except (SafetensorError, UnicodeDecodeError) as error:
            reason = str(error)
        log.warning("the cache file %s is damaged (%s): it is dropped and computed again", path, reason)
        path.unlink(missing_ok=True)
        return None

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save tensors; only the main process writes."""
        distributed.on_main_rank(partial(self._write, name, tensors))

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        with replacing(self._path(name)) as path:
            save_file(tensors, path, metadata={CHECKSUM: content_key(dict(sorted(tensors.items())))})

    def locked(self, name: str) -> AbstractContextManager[None]:
        """Hold the folder's lock file `name.lock`; the main process holds it for all."""
        return distributed.held_by_main_rank(locked(self.folder / f"{name}.lock"))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """List an optimizer's state as tensors, called `<number of the parameter>/<name>`."""
    state = optimizer.state_dict()["state"]
    return {f"{index}/{name}": value for index, values in state.items() for name, value in values.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer the state that `optimizer_tensors` listed."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split("/")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def content_key(*parts: Any) -> str:
    """Short hash of models, tensors, nested lists and mappings of them, and anything with a stable `repr`."""
    digest = hashlib.sha256()
    for part in parts:
        _update(digest, part)
    return digest.hexdigest()[:16]


def _update(digest: "hashlib._Hash", part: Any) -> None:
    match part:
        case Tensor():
            tensor = part.detach().cpu().contiguous()
            digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        case nn.Module():
            digest.update(type(part).__name__.encode())
            _update(digest, part.state_dict())
            _update(digest, settings_of(part))
        case Mapping():
            for key, value in part.items():
                digest.update(str(key).encode())
                _update(digest, value)
        case list() | tuple():
            digest.update(f"[{len(part)}".encode())
            for value in part:
                _update(digest, value)
        case _:
            digest.update(repr(part).encode())


def file_name(method: Any) -> str:
    """Name of the files with what an estimator or moment found, from its fields and its code, which may be yours."""
    return f"{type(method).__name__}-{content_key(method, code_of(method.__class__))}"


def calibration_key(calibration: Iterable) -> str:
    """The data's own `content_key` if there is one, otherwise a hash of all batches."""
    own = getattr(calibration, "content_key", None)
    return own if own is not None else content_key(*calibration)


def name_of(function: Callable, argument: str) -> str:
    """Module and name of a function. Raises `ValueError` if they do not distinguish it from others."""
    name = getattr(function, "__qualname__", "<unnamed>")
    if "<" in name:
        raise ValueError(
            f"cache= needs {argument}= to have a name of its own: define it as a function at the top of a module"
        )
    return f"{function.__module__}.{name}"


@cache
def shared_code() -> str:
    """Hash of the code that every result may depend on."""
    paths = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    shared = [path for path in paths if path.parts[0] not in WITHOUT_RESULTS and METHODS not in path.parts]
    return content_key({str(path): statements(PACKAGE / path) for path in shared})


def code_of(cls: type) -> str:
    """Hash of the file that defines a class; empty if it was typed into a session."""
    try:
        return content_key(statements(Path(inspect.getfile(cls))))
    except (OSError, TypeError):
        return ""


@cache
def statements(path: Path) -> str:
    """Code of a file, without comments and docstrings."""
    with _parsing:
        tree = ast.parse(path.read_bytes())  # in UTF-8, whatever the locale
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
