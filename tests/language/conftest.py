"""The model of children's stories, and stories that it tells."""

import pytest
import torch

from facts.moments.losses import next_tokens
from tests.language.stories import story_recipe


@pytest.fixture(scope="session")
def stories(tmp_path_factory):
    return story_recipe(tmp_path_factory.mktemp("stories")).build()


@pytest.fixture(scope="session")
def beginnings(stories):
    """The beginnings of sixteen stories, four a batch, to calibrate on."""
    start = torch.ones(16, 1, dtype=torch.long)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = {"do_sample": True, "min_length": 64, "max_length": 64, "pad_token_id": 0}
        tokens = stories.generate(start, attention_mask=start, **settings)
    return [(batch, next_tokens(batch)) for batch in tokens.split(4)]
