"""Tasks on a Ray cluster."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Annotated, Any

import ray
from pydantic import Field

from experiments.launchers.base import Prepare
from facts.utils.options import NotNegative, options


@options
class Ray:
    """A Ray cluster at `address` (`auto`: the running one), or one of this machine alone, which ends with the run.

    Each task takes so many of its `cpus` and `gpus`. One whose process dies runs again, `retries` times at most.
    """

    address: str | None = None
    cpus: NotNegative = 1
    gpus: NotNegative = 0
    retries: Annotated[int, Field(ge=0)] = 3

    def executor(self, num_tasks: int, prepare: Prepare) -> Executor:
        own: dict[str, Any] = {} if self.address else {"num_cpus": num_tasks * max(1, round(self.cpus))}
        ray.init(self.address, include_dashboard=False, **own)
        remote = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=self.retries)(_prepared)
        return _RayExecutor(lambda *args: remote.remote(prepare, *args).future(), ray.shutdown)


def _prepared(prepare: Prepare, task: Callable[..., Any], *args: Any) -> Any:
    prepare()
    return task(*args)


class _RayExecutor(Executor):
    def __init__(self, send: Callable[..., Future], close: Callable[[], None]):
        self.send, self.close = send, close

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        return self.send(task, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.close()
