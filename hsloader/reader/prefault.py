"""Gives the ring's first slots their pages while the feeder process starts.

A new page of a memory file costs the kernel 0.6 s of CPU time a GB, one that is there already 0.2 (measured, 4 KiB
pages). The feeder needs a tenth of a second to start, in which this process waits and a core is free: time enough for
some 200 MB, the first batch of many trainings, which is then there sooner by most of that.
"""

from __future__ import annotations

import contextlib
import threading

from hsloader.reader.access import populate_for_writing
from hsloader.reader.counters import FeederCounter
from hsloader.reader.limits import cpu_share
from hsloader.reader.ring import Ring

__all__ = ["prefault_while_starting"]

_STEP = 4 << 20


def prefault_while_starting(ring: Ring) -> None:
    """Start a thread that ends as soon as the feeder is ready, the ring is closed or every slot has its pages.

    Nothing is started where this process has one core only: the feeder needs it.
    """
    if cpu_share() > 1:
        ring.slot(0)  # maps them, which only one thread may do
        with contextlib.suppress(RuntimeError):  # where no more threads are allowed, the feeder gives the pages
            threading.Thread(target=_prefault, args=(ring,), name="hsl-prefault", daemon=True).start()


def _prefault(ring: Ring) -> None:
    for number in range(ring.shape.slots):
        memory = ring.slot(number)
        for start in range(0, len(memory), _STEP):
            if ring.feeder[FeederCounter.READY_AT] or ring.fd < 0:
                return
            populate_for_writing(memory[start : start + _STEP])
