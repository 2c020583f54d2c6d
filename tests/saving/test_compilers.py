"""Compiled networks compute the same. They run apart: behind OpenMMLab's libraries, a process ended by signal 11."""

import subprocess
import sys

COMPILED = """
import torch
import facts
from facts.saving import export
from tests.networks import make_vit
images = torch.randn(4, 3, 16, 16)
network = facts.compress(make_vit().float(), [images], estimator="pela", search="uniform", form="plain").model
expected, *found = [export._in_pytorch(network, torch.float32, each)(images) for each in export.COMPILERS.values()]
for outputs in found:
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
"""


def test_compilers_compute_the_network():
    """Seen on a CPU, where neither CUDA graphs nor kernels of Triton run."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True)
