"""Timing of functions that take turns, A B A B, so that their ratio holds on a busy machine."""

from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer

from facts.utils.options import Positive, options


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of each turn."""

    seconds: tuple[Positive, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """The interquartile range as a share of the median."""
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def ratio(self, other: Self) -> float:
        """Ratio of these seconds to the others: the median over turns."""
        return median(own / others for own, others in zip(self.seconds, other.seconds, strict=True))


@options
class TimingPolicy:
    """Length of a measurement: `num_warmups` calls of each function, then `min_seconds` in each of `num_turns`.

    With 0 seconds, a turn is one call.
    """

    num_warmups: Annotated[int, Field(ge=0)] = 1
    num_turns: Annotated[int, Field(ge=2)] = 7
    min_seconds: Annotated[float, Field(ge=0)] = 0.2

    def times(self, functions: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Time each function in turns, with torch's current number of threads; a GPU is synchronised."""
        for call in [*functions.values()] * self.num_warmups:
            call()
        turns = [{name: self._turn(call) for name, call in functions.items()} for _ in range(self.num_turns)]
        return {name: Timing(tuple(turn[name] for turn in turns)) for name in functions}

    def _turn(self, call: Callable[[], Any]) -> float:
        if self.min_seconds:
            many = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
            return many.blocked_autorange(min_run_time=self.min_seconds).median
        start = timer()
        call()
        return timer() - start


DEFAULT_TIMING = TimingPolicy()
