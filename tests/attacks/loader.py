"""A process that loads the folders it is given, one a line, and tells how each ended and what it took.

It runs as `python -m tests.attacks.loader`. What it took is measured around the loading alone: processor time, since
the clock depends on what else runs, and the highest memory above what the process held before.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import facts

SECONDS, MEBIBYTES = 20, 4096  # beyond which the process ends, for what would hang or fill the memory


def memory(field: str) -> int:
    """A field of the process's status, in KiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def attempt(folder: str) -> dict:
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    before, start = memory("VmRSS"), time.process_time()
    try:
        facts.load_compressed(folder)
        outcome = "loaded"
    except (ValueError, OSError) as error:
        outcome = f"refused: {error}"
    except BaseException as error:  # a fault of ours: it is told, and the next folder tried
        outcome = f"{type(error).__name__}: {error}"
    seconds = time.process_time() - start
    return {"outcome": outcome, "seconds": seconds, "mebibytes": (memory("VmHWM") - before) / 1024}


if __name__ == "__main__":
    for path in sys.argv[1:]:  # whole folders, so that what is imported once is not counted
        facts.load_compressed(path)
    resource.setrlimit(resource.RLIMIT_DATA, (memory("VmData") * 1024 + MEBIBYTES * 2**20,) * 2)
    print("ready", flush=True)
    for line in sys.stdin:
        signal.alarm(SECONDS)
        print(json.dumps(attempt(line.rstrip(os.linesep))), flush=True)
        signal.alarm(0)
