"""One run on several processes started by `torchrun`: each takes its share of the data, and sums are added up.

All processes run the same program. Where they meet, they first exchange errors: an error in one is raised in all, so
none waits for a process that has failed. If a process is killed, torchrun ends the others.
"""

import atexit
import logging
import os
import pickle
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from facts.utils.progress import hide_displays

T = TypeVar("T")

MOST_WORKERS = 16
QUOTAS = (  # of microseconds in a period, by version 2 and 1 of control groups
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
LONGEST_WAIT = timedelta(days=2)  # long enough for a rank search on the main rank; a dead process is noticed sooner


@dataclass(frozen=True)
class _Group:
    """This process's place among the others; until `join`, it is the only one."""

    rank: int = 0
    size: int = 1
    messages: Any = None  # torch's group for exchanging objects


_group = _Group()


@dataclass(frozen=True)
class _Failure:
    error: BaseException


def join() -> None:
    """Join the processes that torchrun started, if any; with GPUs, each process takes its own."""
    global _group
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or _group.size > 1:
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=LONGEST_WAIT)
    atexit.register(dist.destroy_process_group)
    messages = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    _group = _Group(dist.get_rank(), dist.get_world_size(), messages)
    if _group.rank:
        logging.disable(logging.INFO)
        hide_displays()


def rank() -> int:
    return _group.rank


def size() -> int:
    return _group.size


@contextmanager
def alone() -> Iterator[None]:
    """Run the block as if this process were the only one."""
    global _group
    before, _group = _group, _Group()
    try:
        yield
    finally:
        _group = before


def all_gather(value: T) -> list[T]:
    """Gather the value of each process on all of them."""
    return [value] if _group.size == 1 else _meet(value)


def on_all_ranks(action: Callable[[], T]) -> T:
    """Run an action on every process; if it fails on one, all raise that error."""
    if _group.size == 1:
        return action()
    try:
        result = action()
    except Exception as error:
        if not hasattr(error, "is_shared"):
            _meet(_Failure(error))
        raise
    _meet(None)
    return result


def on_main_rank(action: Callable[[], T]) -> T:
    """Run an action only on the main rank; all ranks return its result or raise its error."""
    if _group.size == 1:
        return action()
    outcome: Any = None
    if _group.rank == 0:
        try:
            with alone():
                outcome = action()
        except (Exception, SystemExit) as error:
            outcome = _Failure(error)
    return _meet(outcome)[0]


@contextmanager
def held_by_main_rank(context: AbstractContextManager) -> Iterator[None]:
    """Enter a context on the main rank for all; an error on entering is raised on all."""
    with ExitStack() as stack:
        on_main_rank(lambda: stack.enter_context(context))
        yield


def all_reduce(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the processes."""
    if _group.size > 1:
        _meet(None)
        for tensor in tensors:
            dist.all_reduce(tensor)


def copy_from_main_rank(tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor with the main rank's."""
    if _group.size > 1:
        _meet(None)
        for tensor in tensors:
            values = tensor.detach().contiguous()
            dist.broadcast(values, src=0)
            tensor.detach().copy_(values)


def _meet(value: Any) -> list[Any]:
    """Exchange values; if several processes failed, all raise the error of the lowest rank."""
    received: list[Any] = [None] * _group.size
    try:
        dist.all_gather_object(received, _portable(value), group=_group.messages)
    except RuntimeError as error:
        raise SystemExit(f"process {_group.rank} lost the others, one of which must have died ({error})") from error
    failure = next((each.error for each in received if isinstance(each, _Failure)), None)
    if failure is None:
        return received
    failure.is_shared = True  # type: ignore[attr-defined]  # see `on_all_ranks`
    try:
        raise failure from (value.error if isinstance(value, _Failure) else None)
    finally:
        del failure, received, value  # the error refers to this frame, which must not refer to the error


def _portable(value: Any) -> Any:
    """Replace an error that cannot be pickled by a `RuntimeError` with its text."""
    if isinstance(value, _Failure):
        try:
            pickle.loads(pickle.dumps(value.error))
        except Exception:
            return _Failure(RuntimeError(f"process {_group.rank}: {type(value.error).__name__}: {value.error}"))
    return value


def device_name(device: torch.device) -> str:
    """Name of a GPU, or of this machine's processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def processor() -> str:
    """Name of this machine's processor, or its architecture if no name is known."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def num_processors() -> int:
    """Number of processors that this process may use: those of its affinity, within its container's quota."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in QUOTAS:
        with suppress(OSError, ValueError):  # there is none, or it is `max`
            quota, period = map(int, " ".join(Path(file).read_text() for file in files).split())
            number = min(number, -(-quota // period)) if quota > 0 else number
    return number


def loader_workers(wanted: int | None) -> int:
    """Number of workers for a loader: as wanted, or this process's share of the processors, up to 16."""
    if wanted is not None:
        return wanted
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    return max(1, min(MOST_WORKERS, num_processors() // sharing))
