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
    """Processes of this machine, which take turns with its GPUs; for one task at a time, this process alone."""

    def executor(self, num_tasks: int, prepare: Prepare) -> Executor:
        if num_tasks == 1:
            return AtOnce()
        context = multiprocessing.get_context("spawn")
        gpus = context.SimpleQueue()
        for number in range(num_tasks):
            gpus.put(number % max(1, torch.cuda.device_count()))
        return ProcessPoolExecutor(num_tasks, context, initializer=_begin, initargs=(prepare, gpus))


def _begin(prepare: Prepare, gpus: SimpleQueue) -> None:
    """Watch over the parent, and take a GPU, before CUDA is initialised."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    number = gpus.get()
    os.environ["CUDA_VISIBLE_DEVICES"] = names[number] if names else str(number)
    prepare()


def _end_with_parent() -> None:
    """A killed parent cannot tell its workers, and they would wait for work forever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
