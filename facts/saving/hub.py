"""Compressed networks on the Hugging Face Hub: pushed from here, pulled by `load_compressed`."""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import EntryNotFoundError

from facts.result import CompressionResult
from facts.saving.manifest import LOADER, Metrics
from facts.saving.model_card import CARD, write_card
from facts.saving.save import save_compressed
from facts.utils.hub import REPOSITORY, answers, offline

DATA = ["model.safetensors", "elastic.safetensors", "*.json", "*.jinja", "*.md", "*.txt"]


def push_to_hub(
    result: CompressionResult,
    repository: str,
    *,
    metrics: Metrics | None = None,
    private: bool = False,
    token: str | None = None,
) -> str:
    """Save a network to the repository `OWNER/NAME`, created if necessary (`private` or not), and return its address.

    `metrics` is as in `save_compressed`; `token` needs write access (default: the one from `hf auth login`). A model
    card that was edited there is kept. Raises `ValueError` for a name of any other form, `ConnectionError` if the hub
    does not answer, and huggingface_hub's `OSError` if it refuses.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(f"{repository!r} is not a repository: name it as OWNER/NAME")
    if not answers():
        raise ConnectionError(f"{constants.ENDPOINT} does not answer: save the network with save_compressed for now")
    hub = HfApi(token=token)
    address = hub.create_repo(repository, private=private, exist_ok=True)
    with TemporaryDirectory(prefix="facts-") as folder:
        with suppress(EntryNotFoundError):  # `write_card` keeps an edited card
            hub.hf_hub_download(repository, CARD, local_dir=folder)
        save_compressed(result, folder, metrics)
        write_card(Path(folder), repository)
        outdated = [LOADER, "elastic.*"]  # if an earlier network had them and this one lacks them
        hub.upload_folder(repo_id=repository, folder_path=folder, delete_patterns=outdated)
    return str(address)


def pull(name: str, revision: str | None = None, token: str | None = None) -> Path:
    """Fetch the data files of a repository to Hugging Face's cache, if they are not there. Raises `OSError`."""
    path = snapshot_download(name, revision=revision, token=token, allow_patterns=DATA, local_files_only=offline())
    return Path(path)
