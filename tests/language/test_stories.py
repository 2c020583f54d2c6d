"""That the published model is read as it was meant: against llama2.c's algorithm and its published sample."""

from tests.language import installed  # noqa: F401, I001

from itertools import pairwise

import pytest
import torch

from tests.language.stories import (
    BYTE,
    EVALUATION,
    FIRST_MERGED,
    SHUFFLED,
    STORY,
    needs_files,
    read_pieces,
    text_loss,
)

pytestmark = [needs_files, pytest.mark.external]

TEXTS = {
    "story": STORY,
    "wikipedia": EVALUATION.read_text(encoding="utf-8")[:3000] if EVALUATION.exists() else "",
    "characters without a token": "The café costs 5 £;\tnaïve 日本 🙂.\n\n  Two  spaces ",
    "one letter": "a",
}
# What llama2.c prints at temperature 0 (its doc/stories260K.md).
PUBLISHED = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She said, \"I want to "
    "play with your ball, but I can't find it.\"\n"
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\n"
    "Lily didn't want to help her mom, so she said, \"I'm sorry, mom. I didn't know what to do.\" Her mom said, "
    "\"Don't worry, Lily. We can help you."
)


def encoded(text):
    """llama2.c's tokens: characters, or else their bytes, of which the pair with the best score merges, and again."""
    pieces = read_pieces()
    number = {piece.text: place for place, piece in enumerate(pieces)}
    tokens = []
    for character in " " + text:
        tokens += [number[character]] if character in number else [number[BYTE(b)] for b in character.encode()]
    while True:
        joined = [pieces[left].text + pieces[right].text for left, right in pairwise(tokens)]
        known = [place for place, text in enumerate(joined) if number.get(text, 0) >= FIRST_MERGED]
        if not known:
            return [1, *tokens]
        best = max(known, key=lambda place: pieces[number[joined[place]]].score)
        tokens[best : best + 2] = [number[joined[best]]]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_tokens_are_those_of_llama2_c(stories, text):
    assert stories.tokenizer(text)["input_ids"] == encoded(text)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_survives_its_tokens(stories, text):
    assert stories.tokenizer.decode(stories.tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_story_is_likely_and_its_words_shuffled_are_not(stories):
    """Measured: 0.96 and 5.6 nats per token. Its author gives 1.30 for stories that it was not trained on."""
    assert text_loss(stories, STORY) < 1.3
    assert text_loss(stories, SHUFFLED) > text_loss(stories, STORY) + 3


def test_greedy_continuation_is_the_published_one(stories):
    start = stories.tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
    expected = stories.tokenizer(PUBLISHED)["input_ids"]
    with torch.inference_mode():
        found = stories.generate(**start, max_length=len(expected), do_sample=False, pad_token_id=0)
    assert found[0].tolist() == expected
