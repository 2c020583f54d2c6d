"""Tasks in processes of this machine, one after another or several at once."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch

from experiments.launchers.base import Prepare


class AtOnce(Executor):
    """An executor that does the work when it is given, in this process."""

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(task(*args, **kwargs))
        return future


@dataclass(frozen=True)
class Processes:
    """Processes of this machine; for one task at a time, this process alone. On the `device` cuda, GPUs take turns."""

    device: str = "cpu"

    def executor(self, num_tasks: int, prepare: Prepare) -> Executor:
        if num_tasks == 1:
            return AtOnce()
        context = multiprocessing.get_context("spawn")
        gpus, names = context.SimpleQueue(), self._gpus()
        for number in range(num_tasks):
            gpus.put(names[number % len(names)] if names else None)
        return ProcessPoolExecutor(num_tasks, context, initializer=_begin, initargs=(prepare, gpus))

    def _gpus(self) -> list[str]:
        if self.device != "cuda":
            return []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]


def _begin(prepare: Prepare, gpus: SimpleQueue) -> None:
    """Watch over the parent, and take a GPU, before CUDA is initialised."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu := gpus.get():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    prepare()


def _end_with_parent() -> None:
    """A killed parent cannot tell its workers, and they would wait for work forever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
