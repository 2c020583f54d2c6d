"""Tasks wherever they run: prepared, one for each worker at a time, and again if their process died."""

import logging
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from experiments.launchers.processes import Processes
from experiments.launchers.submitit import Continued

pytestmark = pytest.mark.system

LAUNCHERS = ("processes", "ray", "submitit_local")


def die_once(marker: Path) -> int:
    """Kill this process, but not the next one that tries."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def seen_gpu() -> str:
    time.sleep(1)  # for the other process to begin too
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.fixture(params=LAUNCHERS)
def launcher(request, cell_config):
    if request.param == "ray":
        pytest.importorskip("ray", reason="Ray is an extra of its own: pip install -e '.[ray]'")
    return instantiate(cell_config(f"launcher={request.param}").launcher)


def test_tasks_run_in_other_processes_that_are_prepared(launcher, tmp_path):
    with launcher.executor(2, partial(os.chdir, tmp_path)) as workers:
        folders = [workers.submit(os.getcwd) for _ in range(3)]
        assert {future.result() for future in folders} == {str(tmp_path)}
        assert workers.submit(os.getpid).result() != os.getpid()
        with pytest.raises(Exception, match="modulo by zero"):
            workers.submit(divmod, 1, 0).result()


def test_one_task_at_a_time_needs_no_other_process():
    with Processes().executor(1, partial(os.chdir, "/no/such/folder")) as workers:
        assert workers.submit(os.getpid).result() == os.getpid()


@pytest.mark.parametrize(("visible", "expected"), [(None, {"0", "1"}), ("5,7", {"5", "7"})])
def test_processes_take_the_gpus_in_turn(monkeypatch, visible, expected):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with Processes("cuda").executor(2, logging.shutdown) as workers:
        assert {future.result() for future in [workers.submit(seen_gpu) for _ in range(4)]} == expected


def test_ray_runs_a_task_again_whose_process_died(cell_config, tmp_path):
    pytest.importorskip("ray", reason="Ray is an extra of its own: pip install -e '.[ray]'")
    launcher = instantiate(cell_config("launcher=ray").launcher)
    with launcher.executor(2, logging.shutdown) as workers:
        assert workers.submit(die_once, tmp_path / "marker").result() != os.getpid()
    assert (tmp_path / "marker").exists()


def test_a_job_that_slurm_stops_is_submitted_again(tmp_path):
    again = Continued(partial(os.chdir, tmp_path)).checkpoint(divmod, 7, 2)
    assert again.result() == (3, 1)
