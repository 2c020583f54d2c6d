"""Compressed networks at Hugging Face: pushed from here, pulled by `load_compressed`."""

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import EntryNotFoundError

from facts.result import CompressionResult
from facts.saving.folder import save_compressed
from facts.saving.manifest import Metrics
from facts.saving.model_card import CARD, is_unchanged, write_card
from facts.utils.hub import REPOSITORY, answers, api, constants, told_plainly


def push_to_hub(
    result: CompressionResult,
    repository: str,
    *,
    metrics: Metrics | None = None,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str = "Network compressed with facts",
) -> str:
    """Save a network to the repository `OWNER/NAME`, created if necessary (`private` or not), and return its address.

    `metrics` are those of `save_compressed`; `revision` is a branch, created if necessary; `token` needs write access
    (default: that of `hf auth login`). A model card that was edited there stays. Raises `ValueError` for a name of
    another form, `ConnectionError` if the hub does not answer, and `PermissionError` without a token that may write.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(f"{repository!r} is no repository: name it as OWNER/NAME")
    if not (token or get_token()):
        raise PermissionError(f"pushing to {repository} takes a token: log in with `hf auth login`, or give token=")
    if not answers():
        raise ConnectionError(
            f"{constants.ENDPOINT} does not answer: save_compressed keeps the network here until it does"
        )
    hub = api(token)
    with TemporaryDirectory(prefix="facts-") as temporary, told_plainly(repository):
        folder = Path(temporary) / repository.rpartition("/")[2]
        save_compressed(result, folder, metrics)
        write_card(folder, repository)
        address = hub.create_repo(repository, private=private, exist_ok=True)
        if revision:
            hub.create_branch(repository, branch=revision, exist_ok=True)
        kept = [CARD] if _has_changed_card(hub, repository, revision) else []
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            ignore_patterns=kept,
        )
        return str(address)


def _has_changed_card(hub: HfApi, repository: str, revision: str | None) -> bool:
    try:
        return not is_unchanged(Path(hub.hf_hub_download(repository, CARD, revision=revision)).read_bytes())
    except EntryNotFoundError:
        return False
