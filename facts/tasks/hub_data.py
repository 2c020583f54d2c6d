"""Data sets on the Hugging Face Hub, named `hub:OWNER/DATASET/CONFIGURATION/SPLIT`."""

from typing import Any

from huggingface_hub import constants

from facts.utils.extras import needing
from facts.utils.hub import answers

HUB = "hub:"


def fetched(source: str, configuration: str | None, split: str | None, instead: str) -> Any:
    """Fetch one split of a data set, or all. On failure, raises `ConnectionError` that suggests `instead`."""
    with needing("llm", f"the data set {source}"):
        from datasets import load_dataset
    repository = "/".join(source.removeprefix(HUB).split("/")[:2])
    try:
        if not (constants.HF_HUB_OFFLINE or answers()):  # the library would retry for minutes
            raise ConnectionError("the hub does not answer; HF_HUB_OFFLINE=1 uses what was fetched before")
        return load_dataset(repository, configuration, split=split)
    except ConnectionError as error:
        message = f"{source} is not on this machine and could not be fetched ({error})"
        raise ConnectionError(f"{message}. Connect the machine to huggingface.co once, or give {instead}") from error
