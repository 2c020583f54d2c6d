"""One run on several processes, as `torchrun` starts them: each takes its share of the data, and sums are added up.

All processes run the same program. Wherever they meet, they first exchange how each fares: what fails on one fails on
all, and none waits for another that gave up. A process that is killed ends the others through torchrun.
"""

import atexit
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

LONGEST_WAIT = timedelta(days=2)  # for a rank search of the main process, say; not what a dead process takes to notice


@dataclass(frozen=True)
class _Group:
    """This process's place among the others; one alone until `join`."""

    rank: int = 0
    size: int = 1
    messages: Any = None  # the group of torch that they go through


_group = _Group()


@dataclass(frozen=True)
class _Failure:
    rank: int
    error: BaseException


def join() -> None:
    """Become one of the processes that torchrun started, if it did, each with its own GPU where there are any."""
    global _group
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or _group.size > 1:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=LONGEST_WAIT)
    else:
        dist.init_process_group("gloo", timeout=LONGEST_WAIT)
    atexit.register(dist.destroy_process_group)
    messages = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    _group = _Group(dist.get_rank(), dist.get_world_size(), messages)
    if _group.rank:
        logging.disable(logging.INFO)


def rank() -> int:
    return _group.rank


def size() -> int:
    return _group.size


def is_main_rank() -> bool:
    return _group.rank == 0


@contextmanager
def alone() -> Iterator[None]:
    """Within the block this process is one of one."""
    global _group
    before, _group = _group, _Group()
    try:
        yield
    finally:
        _group = before


def all_gather(value: T) -> list[T]:
    """What each process brings, on all of them."""
    return [value] if _group.size == 1 else _meet(value)


def on_all_ranks(action: Callable[[], T]) -> T:
    """Run it on every process; where it fails on one, all raise that error once they are through."""
    if _group.size == 1:
        return action()
    try:
        result = action()
    except Exception as error:
        if not hasattr(error, "is_shared"):
            _meet(_Failure(_group.rank, error))
        raise
    _meet(None)
    return result


def on_main_rank(action: Callable[[], T]) -> T:
    """Run it on the main process, as if it were alone; all get what it returns or raises."""
    if _group.size == 1:
        return action()
    outcome: Any = None
    if is_main_rank():
        try:
            with alone():
                outcome = action()
        except (Exception, SystemExit) as error:
            outcome = _Failure(_group.rank, error)
    return _meet(outcome)[0]


@contextmanager
def held_by_main_rank(context: AbstractContextManager) -> Iterator[None]:
    """The main process enters a context for all; what it raises on entering, all raise."""
    with ExitStack() as stack:
        on_main_rank(lambda: stack.enter_context(context))
        yield


def all_reduce(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the processes."""
    if _group.size > 1:
        _meet(None)
        for tensor in tensors:
            dist.all_reduce(tensor)


def shard(batches: Iterable[T]) -> Iterable[T]:
    """This process's share of some data: of as many batches in a row as there are processes, the one of its rank.

    Data that can leave the others unread have a method `shard(rank, size)`.
    """
    if _group.size == 1:
        return batches
    own = getattr(batches, "shard", None)
    return own(_group.rank, _group.size) if own else islice(batches, _group.rank, None, _group.size)


def _meet(value: Any) -> list[Any]:
    """Exchange values; of several failures all processes raise the same one, that of the lowest rank."""
    received: list[Any] = [None] * _group.size
    try:
        dist.all_gather_object(received, _portable(value), group=_group.messages)
    except RuntimeError as error:
        raise SystemExit(f"process {_group.rank} lost the others, one of which must have died ({error})") from error
    failure = next((each.error for each in received if isinstance(each, _Failure)), None)
    if failure is None:
        return received
    failure.is_shared = True  # type: ignore[attr-defined]  # see `everywhere`
    try:
        raise failure from (value.error if isinstance(value, _Failure) else None)
    finally:
        del failure, received, value  # the error holds this frame, which must not hold the error


def _portable(value: Any) -> Any:
    """A failure that survives the journey: errors that cannot be pickled become a `RuntimeError`."""
    if not isinstance(value, _Failure):
        return value
    try:
        pickle.loads(pickle.dumps(value.error))
        return value
    except Exception:
        error = RuntimeError(f"process {value.rank}: {type(value.error).__name__}: {value.error}")
        return _Failure(value.rank, error)
