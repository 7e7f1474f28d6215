"""What watching costs: the time that counters and lines take of a batch.

    python -m benchmarks.monitoring

A batch costs the trainer a dozen counters, one ``count_wait`` and one ``batch_done``; every ``log_every`` seconds it
costs a heartbeat. The bound is 1 % of the time between batches of 100 MB at 15 GB/s.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable

import numpy as np

from hsloader.monitor.counters import TrainerCounter, count_wait
from hsloader.monitor.header import take_snapshot
from hsloader.monitor.reporter import Reporter
from hsloader.reader.ring import Ring, RingShape

COUNTERS = 12  # that the loader and the client write a batch
BATCH = 100e6 / 15e9  # seconds
LOG_EVERY = 30.0


def microseconds(function: Callable[[], object], times: int) -> float:
    """The mean time of a call, the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(times):
            function()
        best = min(best, (time.perf_counter() - begun) / times)
    return best * 1e6


def main() -> None:
    """Measure and print a table, and the share of a batch's time."""
    logging.getLogger("hsloader").addHandler(logging.NullHandler())
    ring = Ring.create(RingShape(slots=8, slot_bytes=mmap.PAGESIZE, area_bytes=1 << 16, threads=24))
    counters: np.ndarray[tuple[int], np.dtype[np.int64]] = ring.trainer
    reporter = Reporter(lambda: take_snapshot(ring.fd), log_every=LOG_EVERY)
    reporter.epoch_began()
    reporter.batch_done()

    def count() -> None:
        counters[TrainerCounter.TOKENS] += 1

    each = microseconds(count, 100_000)
    wait = microseconds(lambda: count_wait(counters, 12_345), 100_000)
    done = microseconds(reporter.batch_done, 100_000)
    beat = microseconds(reporter._heartbeat, 500)
    stats = microseconds(reporter.stats, 500)
    batch = COUNTERS * each + wait + done
    share = batch / 1e6 / BATCH + beat / 1e6 / LOG_EVERY
    for name, value in (
        ("one counter", each),
        ("count_wait", wait),
        ("batch_done", done),
        ("a batch, in all", batch),
        ("a heartbeat", beat),
        ("stats()", stats),
    ):
        print(f"{name:<16} {value:8.2f} us")
    print(f"{share:.2%} of the time between batches of 100 MB at 15 GB/s (bound 1 %)")
    ring.close()
    raise SystemExit(share >= 0.01)


if __name__ == "__main__":
    main()
