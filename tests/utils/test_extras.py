"""Packages that only some uses need."""

import subprocess
import sys

import pytest

from facts.utils.extras import needing

LEAN = """
import sys
for name in ("hydra", "jinja2", "matplotlib", "omegaconf", "pandas", "sklearn", "wandb"):
    sys.modules[name] = None
import torch, facts
import facts.cli.compress, facts.cli.evaluate, facts.cli.inspect, facts.tasks
model = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Linear(12, 3))
facts.compress(model, [(torch.randn(8, 12), torch.randint(3, (8,)))], ratio=0.8)
facts.pareto
"""


def test_a_missing_package_is_named_with_its_extra():
    named = r"^a dream needs no_such_package: pip install -e '.\[dreams\]'$"
    with pytest.raises(ModuleNotFoundError, match=named), needing("dreams", "a dream"):
        import no_such_package  # noqa: F401


@pytest.mark.system
def test_a_network_is_compressed_without_what_tables_need():
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("a comparison needs pandas: pip install -e '.[experiments]'")
