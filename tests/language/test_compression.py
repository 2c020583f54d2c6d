"""Every estimator on the model of children's stories, calibrated on stories that it tells."""

from tests.language import installed  # noqa: F401, I001

import pytest

from facts import compress
from facts.estimators import ESTIMATORS
from facts.tasks.language.base import perplexity
from tests.language.stories import SHUFFLED, STORY, needs_files, text_loss
from tests.networks import UNIFORM

pytestmark = [needs_files, pytest.mark.external]

RATIO = 0.8
NUM_LAYERS = 35  # seven in each of five blocks
NUM_TOKENS = 512  # the perplexity of a network that knows nothing


@pytest.fixture(scope="module")
def compressed(stories, told):
    """The networks by estimator, all ranks at the same ratio; each is made once."""
    known = {}

    def by(name):
        if name not in known:
            known[name] = compress(stories, told, estimator=name, ratio=RATIO, cost="params", **UNIFORM)
        return known[name]

    return by


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_keeps_to_the_budget(stories, told, compressed, name):
    result = compressed(name)
    assert_within_budget(stories, result)
    assert perplexity(stories, told) < perplexity(result.model, told) < NUM_TOKENS


@pytest.mark.parametrize("name", ["facts", "kfac_expand", "svd_llm", "flar"])
def test_the_story_stays_likelier_than_its_words_shuffled(stories, compressed, name):
    """Measured: at most 3.9 nats per token with these, against 5.6 of the shuffled words, and 5.5 with a plain SVD."""
    loss = text_loss(compressed(name).model, STORY)
    assert loss < text_loss(stories, SHUFFLED) - 1
    assert loss < text_loss(compressed("pela").model, STORY) - 1


def test_cors_chooses_better_ranks_than_the_same_ratio_everywhere(stories, told, compressed):
    """Measured: 2.2 nats per token against 3.6 of the story."""
    searched = compress(
        stories,
        told,
        estimator="svd_llm",
        search="cors",
        form="plain",
        sensitivity=told[:2],
        ratio=RATIO,
        cost="params",
    )
    assert_within_budget(stories, searched)
    assert text_loss(searched.model, STORY) < text_loss(compressed("svd_llm").model, STORY) - 0.5


def assert_within_budget(dense, result):
    """By what the networks hold, not by the summary alone: nothing but these layers changes."""
    layers = sum(dense.get_submodule(name).weight.numel() for name in result.plan)
    assert len(result.plan) == NUM_LAYERS
    assert any(rank is not None for rank in result.plan.values())
    assert size(dense) - size(result.model) >= (1 - RATIO) * layers
    assert result.summary.spent["params"] <= result.summary.budget["params"] == RATIO * layers


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())
