"""Checkpoint files: finding, reading and checking them."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import RemoteEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from facts.utils.files import at_home
from facts.utils.hub import offline, refusal
from facts.utils.options import first_line

ROOT = Path(__file__).parents[2]  # contains the packages `facts` and `experiments`
INDEX = ".safetensors.index.json"  # lists the files of weights in several
PUBLISHED = ("model.safetensors", f"model{INDEX}")
SUFFIXES = (".safetensors", ".pth", ".pth.tar", ".bin")
# Script arguments, and the logs in OpenMMLab's own checkpoints.
OTHER_OBJECTS = (
    "argparse.Namespace",
    "builtins.getattr",
    "mmengine.logging.history_buffer.HistoryBuffer",
    "numpy.dtype",
    "numpy.ndarray",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
)
WRAPPERS = ("module.", "_orig_mod.")  # around all names: DataParallel's, and that of torch.compile
SHOWN = 3  # tensors that do not fit, in an error message


def fetched(repository: str) -> Path | None:
    """Find a repository's published weights if this machine has fetched them before; None otherwise."""
    for name in PUBLISHED:
        path = try_to_load_from_cache(repository, name)
        if isinstance(path, str) and all(file.exists() for file in weight_files(Path(path))):
            return Path(path)
    return None


def fetch(repository: str) -> Path:
    """Fetch the published weights of a repository. Raises `FileNotFoundError` if they cannot be fetched."""
    try:
        with suppress(RemoteEntryNotFoundError):
            return Path(hf_hub_download(repository, PUBLISHED[0], local_files_only=offline()))
        index = Path(hf_hub_download(repository, PUBLISHED[1]))  # of weights in several files
        for file in weight_files(index):
            hf_hub_download(repository, file.name)
        return index
    except OSError as error:
        reason = "connect to huggingface.co once" if offline() else first_line(error).rstrip(".")
        raise FileNotFoundError(
            f"the weights of {repository} could not be fetched: {refusal(error, repository) or reason}. Or give a "
            "checkpoint file or its folder as weights (--weights; in experiments, checkpoints=FOLDER)."
        ) from error


def find_checkpoint(weights: str) -> Path:
    """Find a checkpoint by its path, or else within this installation. Raises `FileNotFoundError`."""
    return _first_file(weights, [at_home(weights), ROOT / weights])


def find_published(folder: Path, repository: str) -> Path:
    """Find a repository's weights in a folder that holds those of many. Raises `FileNotFoundError`."""
    name = repository.rpartition("/")[2]
    single = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
    return _first_file(folder, single + [folder / name / published for published in PUBLISHED])


def _first_file(weights: Path | str, candidates: list[Path]) -> Path:
    for path in candidates:
        if path.is_file():
            return path
    needs_folder = str(weights).startswith(("pretrained/", "random/"))  # checkpoints=random with profile=photos
    others = "" if needs_folder else ", or `pretrained` or `random`"
    raise FileNotFoundError(
        f"no checkpoint {str(weights)!r}: looked for {', '.join(dict.fromkeys(map(str, candidates)))}. "
        f"Give a safetensors or PyTorch file or a folder of published ones{others}."
    )


def weight_files(path: Path) -> list[Path]:
    """Files of the weights: the checkpoint itself, or those that an index lists."""
    if not path.name.endswith(INDEX):
        return [path]
    try:
        names = [Path(name).name for name in json.loads(path.read_bytes())["weight_map"].values()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no index with a `weight_map` from tensors to files; fetch it again") from error
    return [path.parent / name for name in dict.fromkeys(names)]


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, of all files in an index, or of a PyTorch file or its `state_dict`.

    Raises `FileNotFoundError` if a file is missing, `ValueError` if one is damaged or holds anything else.
    """
    return {name: tensor for file in weight_files(path) for name, tensor in _read(file).items()}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            content: object = load_file(path)
        else:
            with torch.serialization.safe_globals([(_Ignored, name) for name in OTHER_OBJECTS]):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError(f"the checkpoint {path} cannot be read (not PyTorch tensors); fetch it again") from error
    except (SafetensorError, RuntimeError, EOFError) as error:
        raise ValueError(f"the checkpoint {path} cannot be read ({first_line(error)}); fetch it again") from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping):
            content = content.get(key, content)
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise ValueError(f"{path} is not a checkpoint: give a file of named tensors, alone or under `state_dict`")
    for wrapper in WRAPPERS:
        if all(name.startswith(wrapper) for name in content):
            content = {name.removeprefix(wrapper): tensor for name, tensor in content.items()}
    return dict(content)


class _Ignored:
    """Stand-in for objects that training scripts save with the tensors, so that none of their code runs."""

    def __new__(cls, *_: object, **__: object) -> "_Ignored":
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        pass


def load_strictly(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load every tensor by name, keeping the model's types. Raises `ValueError` with the first few that do not fit."""
    expected, found = _shapes(model.state_dict()), _shapes(tensors)
    misfits = [
        f"{name}: {found.get(name, 'nothing')} instead of {expected.get(name, 'nothing')}"
        for name in {**expected, **found}
        if found.get(name) != expected.get(name)
    ]
    refuse_misfits(misfits, model, path)
    model.load_state_dict(tensors)


def refuse_misfits(misfits: list[str], model: nn.Module, path: Path) -> None:
    """Raises `ValueError` if there are misfits."""
    if misfits:
        raise ValueError(
            f"the checkpoint {path} does not fit this {type(model).__name__}: {len(misfits)} tensors differ, the first "
            f"being {'; '.join(misfits[:SHOWN])}. Give this network's file, or the network of the file."
        )


def sha256(path: Path) -> str:
    """Hash of a checkpoint, as the hub shows it; for an index, the hashes of all its files."""
    hashes = []
    for part in weight_files(path):
        with part.open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return " ".join(hashes)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
