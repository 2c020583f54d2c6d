"""The files of `conf/pruning`."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.config import CONF
from experiments.instantiation import instantiate
from facts.pruning import PRUNERS

FILES = Path(CONF) / "pruning"


def test_every_method_has_a_file():
    assert sorted(path.stem for path in FILES.glob("*.yaml")) == sorted(PRUNERS)


@pytest.mark.parametrize("name", PRUNERS)
def test_the_files_say_the_defaults_of_the_classes(name):
    config = OmegaConf.merge({"seed": 0}, OmegaConf.load(FILES / f"{name}.yaml"))
    assert instantiate(config.paper) == PRUNERS[name]()
    for profile in (config.paper, config.mini):
        assert set(profile) - {"_target_"} == set(PRUNERS[name].__dataclass_fields__)
