"""Hugging Face's hub: the form of repository names, and whether the hub answers."""

import re
import time
from functools import cache
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants

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
