"""Configurations changed at random: each is accepted, or refused by an error of one line."""

from functools import cache

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.cell import Cell
from experiments.config import CONF
from tests.saving.test_refusals import VALUES, places

pytestmark = [pytest.mark.attack, pytest.mark.system]

CHOICES = (
    (),
    ("search=cors",),
    ("search=comcat",),
    ("estimator=gfwsvd",),
    ("estimator=flar",),
    ("finetuning=recovery",),
    ("finetuning=low_rank",),
    ("analysis=throughput",),
    ("analysis=fisher_similarity",),
    ("pruning=nvit", "estimator=none"),
)
FIELDS = ("ratio", "cost", "labels", "form", "seed", "cache", "fit_bias", "excluded_names")  # without a group


@cache
def composed(choice: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose("config", overrides=["tracking=off", "task.mini.num_calibration=128", *choice])


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice[0] if choice else "default")
@settings(max_examples=100)
@given(data=st.data())
def test_a_configuration(choice, data, tmp_path_factory):
    config = composed(choice).copy()
    config.results = str(tmp_path_factory.getbasetemp())
    found = [place for place in places(OmegaConf.to_container(config)) if len(place) > 1 or place[0] in FIELDS]
    *groups, name = data.draw(st.sampled_from([place for place in found if "paper" not in place]))
    try:
        group = config
        for each in groups:
            group = group[each]
        group[name] = data.draw(VALUES)
    except (OmegaConfBaseException, TypeError, KeyError):
        return  # Hydra refuses it before us
    try:
        Cell.of(config)
    except (ImportError, OSError, ValueError, OmegaConfBaseException) as error:
        assert isinstance(error, OmegaConfBaseException) or "\n" not in str(error), error
