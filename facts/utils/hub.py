"""Hugging Face's hub: the form of repository names, whether the hub answers or refuses, and its data sets."""

import re
import time
from functools import cache
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError

from facts.utils.options import needing

HUB = "hub:"  # begins the name of a data set: hub:OWNER/DATASET/CONFIGURATION/SPLIT
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def offline() -> bool:
    """Check whether to read only fetched files: by choice, or because the hub is silent and each try takes minutes."""
    return constants.HF_HUB_OFFLINE or not answers()


def answers() -> bool:
    """Check whether the hub answers, at most once a minute."""
    return _answers(constants.ENDPOINT, int(time.monotonic() // 60))


@cache
def _answers(address: str, minute: int) -> bool:
    try:
        urlopen(Request(address, method="HEAD"), timeout=5).close()
    except OSError as error:
        return isinstance(error, HTTPError)
    return True


def refusal(error: BaseException | None, name: str) -> str:
    """Say in a line why the hub refused the repository `name`, and what to do; empty if it did not."""
    while isinstance(error, EntryNotFoundError) or not isinstance(error, HfHubHTTPError):
        if error is None:
            return ""
        error = error.__cause__ or error.__context__
    status, login = error.response.status_code, "log in with `hf auth login`"
    reasons = {
        401: f"there is no {name}, or it is private: check the name, or {login}",
        403: f"your account may not use {name}: {login} as somebody who may",
        404: f"there is no {name}: check the name; if it is private, {login}",
    }
    reason = reasons.get(status, "try again later")
    if isinstance(error, GatedRepoError):
        reason = f"{name} has a licence: accept it at {constants.ENDPOINT}/{name}, then {login}"
    return f"{constants.ENDPOINT} answers with {status}; {reason}"


def fetched(source: str, configuration: str | None, split: str | None, instead: str) -> Any:
    """Fetch one split of a data set, or all. On failure, raises `ConnectionError` that suggests `instead`."""
    with needing("llm", f"the data set {source}"):
        from datasets import load_dataset
    repository = "/".join(source.removeprefix(HUB).split("/")[:2])
    try:
        if offline() and not constants.HF_HUB_OFFLINE:  # the library would retry for minutes
            raise ConnectionError("the hub does not answer; HF_HUB_OFFLINE=1 uses what was fetched before")
        return load_dataset(repository, configuration, split=split)
    except OSError as error:
        if reason := refusal(error, repository):
            raise ConnectionError(reason) from error
        if not isinstance(error, ConnectionError):
            raise
        message = f"{source} is not on this machine and could not be fetched ({error})"
        raise ConnectionError(f"{message}. Connect the machine to huggingface.co once, or give {instead}") from error
