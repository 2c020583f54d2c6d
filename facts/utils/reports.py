"""Reports about running stages to a listener."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, dict[str, float]], None]
"""Gets a stage's name and what is now known about it: its `seconds` at its end, or the `loss` of an `epoch`."""

_listener: ContextVar[Listener | None] = ContextVar("_listener", default=None)


def report(stage: str, **values: float) -> None:
    """Tell the listener, if there is one, about a stage."""
    if listener := _listener.get():
        listener(stage, values)


@contextmanager
def reporting_to(listener: Listener) -> Iterator[None]:
    """Report the stages within the block to `listener` while they run."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
