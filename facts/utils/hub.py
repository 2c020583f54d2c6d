"""Hugging Face's hub: the form of repository names, whether the hub answers, and its data sets."""

import re
import time
from functools import cache
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants

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


def fetched(source: str, configuration: str | None, split: str | None, instead: str) -> Any:
    """Fetch one split of a data set, or all. On failure, raises `ConnectionError` that suggests `instead`."""
    with needing("llm", f"the data set {source}"):
        from datasets import load_dataset
    repository = "/".join(source.removeprefix(HUB).split("/")[:2])
    try:
        if offline() and not constants.HF_HUB_OFFLINE:  # the library would retry for minutes
            raise ConnectionError("the hub does not answer; HF_HUB_OFFLINE=1 uses what was fetched before")
        return load_dataset(repository, configuration, split=split)
    except ConnectionError as error:
        message = f"{source} is not on this machine and could not be fetched ({error})"
        raise ConnectionError(f"{message}. Connect the machine to huggingface.co once, or give {instead}") from error
