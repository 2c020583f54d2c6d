"""Tasks as jobs of Slurm."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Annotated, Any, Literal

import submitit
from pydantic import Field
from submitit.helpers import DelayedSubmission

from experiments.launchers.base import Prepare
from facts.utils.options import Count, options


@options
class Submitit:
    """Jobs of the `cluster`, `slurm` or for trials `local`, whose scripts and logs go to `folder`.

    Slurm stops a job after `timeout_min`, or for one that matters more: it is submitted again, and continues from the
    records. `parameters` are further ones of submitit, such as `slurm_partition` and `slurm_account`.
    """

    cluster: Literal["slurm", "local"]
    folder: str
    timeout_min: Count = 1440
    cpus_per_task: Count = 8
    gpus_per_node: Annotated[int, Field(ge=0)] = 1
    mem_gb: Annotated[float, Field(gt=0)] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)

    def executor(self, num_tasks: int, prepare: Prepare) -> Executor:
        jobs = submitit.AutoExecutor(self.folder, cluster=self.cluster)
        jobs.update_parameters(
            timeout_min=self.timeout_min,
            cpus_per_task=self.cpus_per_task,
            gpus_per_node=self.gpus_per_node,
            **({"mem_gb": self.mem_gb} if self.mem_gb else {}),
            **self.parameters,
        )
        return _JobExecutor(jobs, num_tasks, prepare)


class Continued:
    """A task that is submitted again if Slurm stops its job."""

    def __init__(self, prepare: Prepare):
        self.prepare = prepare

    def __call__(self, task: Callable[..., Any], *args: Any) -> Any:
        self.prepare()
        return task(*args)

    def checkpoint(self, *args: Any) -> DelayedSubmission:
        return DelayedSubmission(self, *args)


class _JobExecutor(ThreadPoolExecutor):
    """Threads that each submit a job and wait for it."""

    def __init__(self, jobs: Any, num_tasks: int, prepare: Prepare):
        super().__init__(num_tasks)
        self.jobs, self.continued = jobs, Continued(prepare)

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        return super().submit(lambda: self.jobs.submit(self.continued, task, *args).result())
