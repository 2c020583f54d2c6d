"""Access to Hugging Face's hub, or to files fetched before if it does not answer."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from facts.utils.version import __version__

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
DATA = ["model.safetensors", "*.json", "*.jinja", "*.md", "*.txt"]
SETTINGS = {"huggingface_hub.constants", "datasets.config"}
SECONDS = 5


@contextmanager
def hub() -> Iterator[None]:
    """Set the libraries offline within the block if the hub does not answer: else they would retry for minutes."""
    own = constants.HF_HUB_OFFLINE
    _set_offline(own or not answers())
    try:
        yield
    finally:
        _set_offline(own)


def _set_offline(offline: bool) -> None:
    for name in SETTINGS & sys.modules.keys():
        vars(sys.modules[name])["HF_HUB_OFFLINE"] = offline


def answers() -> bool:
    """Check that the hub answers; at most once a minute."""
    return _answers(constants.ENDPOINT, int(time.monotonic() // 60))


@cache
def _answers(address: str, minute: int) -> bool:
    try:
        urlopen(Request(address, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True


def api(token: str | None = None) -> HfApi:
    return HfApi(endpoint=constants.ENDPOINT, token=token, library_name="facts", library_version=__version__)


def pulled(repository: str, revision: str | None = None, token: str | None = None) -> Path:
    """Fetch a repository's data files, unless they are there, to a folder in Hugging Face's cache.

    Raises an `OSError` that says why if this fails.
    """
    with hub(), told_plainly(repository):
        return Path(api(token).snapshot_download(repository, revision=revision, allow_patterns=DATA))


@contextmanager
def told_plainly(repository: str) -> Iterator[None]:
    """Turn the hub's errors into `ConnectionError`, `FileNotFoundError` or `PermissionError` that say what to do."""
    try:
        yield
    except GatedRepoError as error:
        raise PermissionError(f"{repository} is gated: ask for access at {constants.ENDPOINT}/{repository}") from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{constants.ENDPOINT} shows no repository {repository}: check the name; if it is private, log in with "
            "`hf auth login`, or give token="
        ) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(f"{repository} has no such revision: give a branch, tag or commit of it") from error
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise
        raise PermissionError(
            f"{constants.ENDPOINT} does not let this token near {repository}: give token= one that may write there"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConnectionError(
            f"{repository} is not on this machine, and {constants.ENDPOINT} does not answer: connect it once, or give "
            "a folder"
        ) from error
