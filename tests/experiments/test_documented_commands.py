"""The commands that the pages print: each composes, whatever extras are installed."""

import re
import shlex

import pytest
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from experiments.cell import check
from experiments.grid import cell_of, chosen_experiments
from experiments.plan import jobs_of
from tests.docs.pages import PAGES, ROOT

FILES = {"run": "run", "reproduce": "reproduce", "doctor": "reproduce", "train_dense": "train_dense"}


def documented() -> list[tuple[str, ...]]:
    """Commands and overrides, each once, but those of docs/extending.md, which are run."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES).replace("\\\n", " ")
    lines = re.findall(rf"-m experiments\.({'|'.join(FILES)})\b([^`\n]*)", text)
    commands = [(FILES[name], *shlex.split(options, comments=True)) for name, options in lines]
    apart = ("NAME", "...", "--", "plan=")
    return sorted({each for each in commands if each[1:] and not any(word in " ".join(each) for word in apart)})


@pytest.mark.system
@pytest.mark.parametrize("command", documented(), ids=" ".join)
def test_it_composes(command, composing, every_extra, monkeypatch):
    """And the first cell of a table of each task."""
    name, *overrides = command
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # restored afterwards
    with composing():
        given = [each for each in overrides if each != "-m"]
        for job in jobs_of(given) if "-m" in overrides else [given]:
            config = compose(name, [*job, "hardware.device=cpu"], return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            with open_dict(config):
                del config["hydra"]
            check(config)
            if name == "reproduce":
                experiments = list(chosen_experiments(config))
                for experiment in {experiment.task: experiment for experiment in experiments}.values():
                    cell_of(experiment, next(iter(experiment.rows)), next(iter(experiment.columns)))
