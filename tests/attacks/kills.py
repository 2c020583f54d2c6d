"""Tables whose makers are killed at random moments and started again: `python -m tests.attacks.kills FOLDER`.

The tables are made once undisturbed; then with kills, all processes of a run at once, until there were enough. Tables
that are finished before are set aside and made anew. All must come out alike, byte for byte, but for columns of time.
By default, 200 kills within an hour.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from experiments.config import CONF

# A data pass, decompositions, searches by measurement and by Fisher information, recovery, an analysis and its figure.
WORK = ("experiment=[beyond,fisher_estimators,motivation_layers]", "workers=2")
SECONDS = 15.0  # before a kill, on average; it takes some eight until the first cell
TIMES = re.compile(r"^.*_minutes,.*\n", re.MULTILINE)


def start(results: Path, work: tuple[str, ...]) -> subprocess.Popen:
    results.mkdir(parents=True, exist_ok=True)
    with (results / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.reproduce", "tracking=off", f"results={results}", *work],
            cwd=Path(CONF).parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(results: Path, work: tuple[str, ...]) -> None:
    if start(results, work).wait():
        raise SystemExit(f"a run that was not disturbed has failed: {results / 'log'} says why")


def tables(results: Path) -> dict[str, str]:
    """The text of each table, without what depends on the clock."""
    return {path.name: TIMES.sub("", path.read_text()) for path in sorted((results / "mini/tables").glob("*.csv"))}


def killed_runs(folder: Path, kills: int, work: tuple[str, ...], seconds: float) -> Iterator[Path]:
    """Yield each folder of tables that came through its share of `kills`, at the moments of a Poisson process."""
    moments, number, done = random.Random(0), 0, 0
    while done < kills:
        process = start(folder / f"killed_{number}", work)
        try:
            status = process.wait(moments.expovariate(1 / seconds))
        except subprocess.TimeoutExpired:
            done += 1
            continue
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status:
            raise SystemExit(f"a run after {done} kills has failed: {folder / f'killed_{number}' / 'log'} says why")
        yield folder / f"killed_{number}"
        number += 1
    finish(folder / f"killed_{number}", work)
    yield folder / f"killed_{number}"


def attack(folder: Path, kills: int, work: tuple[str, ...] = WORK, seconds: float = SECONDS) -> int:
    """Kill runs; return how often all tables were made. Raises `SystemExit` for tables that differ."""
    finish(folder / "undisturbed", work)
    expected, count = tables(folder / "undisturbed"), 0
    for results in killed_runs(folder, kills, work, seconds):
        made = tables(results)
        if differing := [name for name in expected.keys() | made.keys() if made.get(name) != expected.get(name)]:
            raise SystemExit(f"tables in {results} differ from the undisturbed ones: {', '.join(differing)}")
        count += 1
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    arguments = parser.parse_args()
    began = time.monotonic()
    made = attack(arguments.folder, arguments.kills)
    minutes = (time.monotonic() - began) / 60
    print(f"{arguments.kills} kills in {minutes:.0f} minutes; the tables were made {made} times, and alike each time")
