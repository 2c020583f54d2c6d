"""Manifests and configurations changed at random: each is accepted, or refused by an error of one line."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.cell import Cell
from experiments.config import CONF
from facts.saving.manifest import MANIFEST
from tests.attacks.test_hostile_folders import MEBIBYTES, SECONDS

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
NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 10**6, 10**12, 2**63, 0.5, -0.1, 1.5, 1e300])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["cpu", "mini", "/", "${ratio}"])
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=4), SCALARS, max_size=2)


def places(content, place=()):
    """Every place of a nested value, branches before what they hold."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in items:
        yield (*place, name)
        yield from places(value, (*place, name))


def change(content, place, value) -> None:
    for name in place[:-1]:
        content = content[name]
    content[place[-1]] = value


@settings(max_examples=100)
@given(st.data())
def test_a_manifest(original, loader, data):
    manifest = json.loads((original / MANIFEST).read_text())
    change(manifest, data.draw(st.sampled_from(list(places(manifest)))), data.draw(VALUES))
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(original, Path(temporary) / "saved")
        (folder / MANIFEST).write_text(json.dumps(manifest))
        result = loader.load(folder)
    outcome = result["outcome"]
    assert outcome == "loaded" or (outcome.startswith("refused: ") and "\n" not in outcome), outcome
    assert result["seconds"] < SECONDS and result["mebibytes"] < MEBIBYTES, result


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
    content = OmegaConf.to_container(config)
    place = data.draw(
        st.sampled_from(
            [place for place in places(content) if (len(place) > 1 or place[0] in FIELDS) and "paper" not in place]
        )
    )
    try:
        change(config, place, data.draw(VALUES))
    except (OmegaConfBaseException, TypeError, KeyError):
        return  # Hydra refuses it before us
    try:
        Cell.of(config)
    except (ImportError, OSError, ValueError, OmegaConfBaseException) as error:
        assert isinstance(error, OmegaConfBaseException) or "\n" not in str(error), error
