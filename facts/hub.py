"""Hugging Face's hub where it answers, and what was fetched from it before where it does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants

SECONDS = 5


@contextmanager
def hub() -> Iterator[None]:
    """Within the block the libraries that fetch something know whether they can: else they try again and again."""
    offline = not answers()
    with patch("huggingface_hub.constants.HF_HUB_OFFLINE", offline), patch("datasets.config.HF_HUB_OFFLINE", offline):
        yield


@cache
def answers() -> bool:
    """Whether the hub is there, and is to be asked at all (`HF_HUB_OFFLINE`)."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True
