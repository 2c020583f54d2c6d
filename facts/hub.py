"""Hugging Face's hub where it answers, and what was fetched from it before where it does not."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants

SETTINGS = {"huggingface_hub.constants", "datasets.config"}  # the second, imported later, takes those of the first
SECONDS = 5


@contextmanager
def hub() -> Iterator[None]:
    """Within the block the libraries that fetch something know whether they can: else they try again and again."""
    offline = constants.HF_HUB_OFFLINE or not answers()
    before = {sys.modules[name]: sys.modules[name].HF_HUB_OFFLINE for name in SETTINGS & sys.modules.keys()}
    try:
        for module in before:
            module.HF_HUB_OFFLINE = offline
        yield
    finally:
        for module, own in before.items():
            module.HF_HUB_OFFLINE = own


@cache
def answers() -> bool:
    """Whether the hub is there."""
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True
