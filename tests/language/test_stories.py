"""A published language model, read as it was meant, compressed, and measured on texts."""

from tests.language import installed  # noqa: F401, I001


import pytest
import torch

from facts import compress
from facts.tasks.language.base import perplexity
from facts.tasks.language.corpus import Corpus
from tests.language.stories import (
    EVALUATION,
    SHUFFLED,
    STORY,
    TRAINING,
    needs_files,
    text_loss,
)
from tests.networks import UNIFORM

pytestmark = [needs_files, pytest.mark.external]

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


def test_compressed_it_still_prefers_the_story(stories, beginnings):
    """Measured: at most 3.9 nats per token, against 5.6 of the shuffled words and 5.5 with a plain SVD; CoRS 2.2."""
    settings = {"ratio": 0.8, "cost": "params"}
    plain = text_loss(compress(stories, beginnings, estimator="pela", **settings, **UNIFORM).model, STORY)
    losses = {}
    for name in ("facts", "kfac_expand", "svd_llm", "flar"):
        result = compress(stories, beginnings, estimator=name, **settings, **UNIFORM)
        layers = sum(stories.get_submodule(layer).weight.numel() for layer in result.plan)
        assert len(result.plan) == 35 and size(stories) - size(result.model) >= 0.2 * layers
        assert perplexity(stories, beginnings) < perplexity(result.model, beginnings) < 512
        losses[name] = text_loss(result.model, STORY)
    assert max(losses.values()) < min(plain, text_loss(stories, SHUFFLED)) - 1
    searched = compress(
        stories, beginnings, estimator="svd_llm", search="cors", form="plain", sensitivity=beginnings[:2], **settings
    )
    assert text_loss(searched.model, STORY) < losses["svd_llm"] - 0.5


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_perplexity_of_wikitext(stories):
    """112.71 on the whole text, against 103.7 and 29.7 by counting tokens and pairs.

    The network and the text are published, so only rounding can change it.
    """
    texts = {"training_text": str(TRAINING), "evaluation_text": str(EVALUATION)}
    figures = Corpus(**texts, sequence_length=256, batch_size=16).evaluate(stories)
    assert figures["perplexity"] == pytest.approx(112.71, rel=1e-3)
    assert figures["bigram_perplexity"] < figures["unigram_perplexity"] < figures["perplexity"]
