"""Answers of the hub, in a line."""

from unittest.mock import Mock

import pytest
from huggingface_hub import errors
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from facts.models.weights import fetch
from facts.utils.hub import refusal
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        (RepositoryNotFoundError, 401, "answers with 401; there is no me/it, or it is private: "),
        (GatedRepoError, 403, "me/it has a licence: accept it at https://.*/me/it, then log in with `hf auth login`"),
        (HfHubHTTPError, 403, "your account may not use me/it: log in with `hf auth login` as somebody who may"),
        (RepositoryNotFoundError, 404, "answers with 404; there is no me/it: check the name"),
        (HfHubHTTPError, 503, "answers with 503; try again later"),
    ],
)
def test_each_refusal_is_a_line_that_helps(monkeypatch, kind, status, words):
    def failing(*_, **__):
        try:
            raise kind("many\nlines", response=Mock(status_code=status))
        except kind as error:
            raise errors.LocalEntryNotFoundError("more\nlines") from error

    monkeypatch.setattr("facts.models.weights.hf_hub_download", failing)
    monkeypatch.setattr("facts.models.weights.offline", lambda: False)
    refuses(words, fetch, "me/it", raised=FileNotFoundError)


def test_what_is_no_refusal_has_other_words():
    assert not refusal(errors.RemoteEntryNotFoundError("no such file", response=Mock(status_code=404)), "me/it")
    assert not refusal(OSError("no network"), "me/it")
