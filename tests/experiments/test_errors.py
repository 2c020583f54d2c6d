"""User errors end a command with one line."""

from types import SimpleNamespace

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from experiments.errors import in_one_line


@pytest.mark.parametrize(("mode", "full"), [(RunMode.RUN, "0"), (RunMode.RUN, "1"), (RunMode.MULTIRUN, "0")])
def test_one_line_unless_in_full_or_in_a_sweep(monkeypatch, mode, full):
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(mode=mode))
    monkeypatch.setenv("HYDRA_FULL_ERROR", full)
    alone = mode == RunMode.RUN and full == "0"
    text = r"^error: ratio is too large \(HYDRA_FULL_ERROR=1 shows where\)$" if alone else "^ratio is too large$"
    with pytest.raises(SystemExit if alone else ValueError, match=text), in_one_line():
        raise ValueError("ratio is too large")
