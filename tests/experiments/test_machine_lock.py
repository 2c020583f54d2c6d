"""Cells run side by side, and none of them while another one measures time."""

import multiprocessing
import time

from experiments.machine_lock import alone, beside_others


def work(folder, measures, events):
    """Two cells, of which the first measures time in its middle if it is to."""
    for _ in range(2):
        with beside_others(folder):
            events.put((time.monotonic(), +1))
            time.sleep(0.1)
            if measures:
                events.put((time.monotonic(), -1))
                with alone():
                    start = time.monotonic()
                    time.sleep(0.2)
                    events.put((start, time.monotonic()))
                events.put((time.monotonic(), +1))
            time.sleep(0.1)
            events.put((time.monotonic(), -1))


def test_nothing_runs_beside_a_measurement(tmp_path):
    (tmp_path / "locks").mkdir()
    context = multiprocessing.get_context("fork")
    events = context.Queue()
    workers = [context.Process(target=work, args=(tmp_path, measures, events)) for measures in (True, True, False)]
    for worker in workers:
        worker.start()
    found = [events.get(timeout=30) for _ in range(2 * (5 + 5 + 2))]
    for worker in workers:
        worker.join()
    measurements = [each for each in found if each[1] > 1]
    steps = sorted(each for each in found if abs(each[1]) == 1)
    assert len(measurements) == 4
    for start, end in measurements:
        assert sum(change for at, change in steps if at < start) == 0
        assert not [at for at, _ in steps if start < at < end]
        assert not [other for other in measurements if start < other[0] < end]
    running = [sum(change for _, change in steps[: number + 1]) for number in range(len(steps))]
    assert max(running) > 1
