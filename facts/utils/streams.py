"""Standard output and errors that cannot end a command: nothing computed may depend on what is printed."""

import os
import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


class _Lasting(FileIO):
    """Output that is dropped if nobody takes it: the reader of a pipe is gone, or the disk is full."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data)
        return len(data)


def make_output_lasting() -> None:
    """Let the output of this process never fail: what cannot be encoded is replaced, and a closed stream takes all."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, so the next file would get its number, and what libraries print
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):  # not a test's
            stream.flush()
            buffer = BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False))
            lines = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, TextIOWrapper(buffer, stream.encoding, "replace", **lines))
