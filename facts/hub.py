"""Hugging Face's hub where it answers, and what was fetched from it before where it does not."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants

SETTINGS = {"huggingface_hub.constants", "datasets.config"}
SECONDS = 5


@contextmanager
def hub() -> Iterator[None]:
    """Within the block the libraries that fetch something know whether they can: else they try again and again."""
    own = constants.HF_HUB_OFFLINE
    _set_offline(own or not answers())
    try:
        yield
    finally:
        _set_offline(own)


def _set_offline(offline: bool) -> None:
    for name in SETTINGS & sys.modules.keys():
        sys.modules[name].HF_HUB_OFFLINE = offline


def answers() -> bool:
    """Whether the hub is there; asked at most once a minute."""
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
