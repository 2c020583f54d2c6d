"""Sweeps of `experiments.run -m`: the runs of one sweep are a group in W&B."""

import re
from typing import Any
from zlib import crc32

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

OF_PLACES = ("results=", "tracking")  # overrides that change no result
MOST_CHARACTERS = 128  # in the name of a W&B group


class GroupRuns(Callback):
    """Name the group of a sweep after its overrides. A restarted sweep joins its earlier runs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        overrides = config.hydra.overrides
        # Hydra applies these in every job, before the job's own overrides, which may include `tracking.group`.
        overrides.hydra.append(f"tracking.group='{group_of(overrides.task)}'")


def group_of(overrides: list[str]) -> str:
    """Join the overrides of a sweep in one line, without characters that Hydra or W&B would interpret."""
    line = " ".join(override for override in overrides if not override.startswith(OF_PLACES))
    plain = re.sub(r"[^\w .,:=/+~@()*-]", "_", line)
    if len(plain) <= MOST_CHARACTERS:
        return plain
    ending = f"... {crc32(line.encode()):08x}"
    return plain[: MOST_CHARACTERS - len(ending)] + ending
