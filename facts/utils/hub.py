"""Hugging Face's hub: the names of its repositories, and whether it answers."""

import re
import time
from functools import cache
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def offline() -> bool:
    """Check whether only fetched files can be read, by choice or since the hub is silent and each try takes minutes."""
    return constants.HF_HUB_OFFLINE or not answers()


def answers() -> bool:
    """Check that the hub answers, at most once a minute."""
    return _answers(constants.ENDPOINT, int(time.monotonic() // 60))


@cache
def _answers(address: str, minute: int) -> bool:
    try:
        urlopen(Request(address, method="HEAD"), timeout=5).close()
    except OSError as error:
        return isinstance(error, HTTPError)
    return True
