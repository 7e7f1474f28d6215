"""Snapshots of rings for tests: plain numbers, as no ring would make them in a second."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hsloader.monitor.counters import FeederCounter, Stage, ThreadCounter, TrainerCounter
from hsloader.monitor.header import Snapshot, ThreadRow

START = 1_000_000_000_000  # nanoseconds


def snapshot(
    seconds: float = 0.0,
    trainer: Mapping[TrainerCounter, int] | None = None,
    feeder: Mapping[FeederCounter, int] | None = None,
    **changes: Any,
) -> Snapshot:
    """A ring of four slots that opened 100 s before ``START``; two read and three decode threads."""
    numbers, fed = [0] * 64, [0] * 64
    numbers[TrainerCounter.STARTED_AT] = START - 100 * 10**9
    numbers[TrainerCounter.REQUESTED] = 12
    numbers[TrainerCounter.RECEIVED] = fed[FeederCounter.FILLED] = 10
    fed[FeederCounter.PID] = 4711
    fed[FeederCounter.READY_AT] = START - 99 * 10**9
    fed[FeederCounter.SEEN_AT] = START + int(seconds * 1e9)
    fed[FeederCounter.READERS], fed[FeederCounter.DECODERS] = 2, 3
    for counter, value in (trainer or {}).items():
        numbers[counter] = value
    for place, value in (feeder or {}).items():
        fed[place] = value
    base = Snapshot(
        at=START + int(seconds * 1e9),
        slots=4,
        slot_bytes=100_000_000,
        trainer=tuple(numbers),
        feeder=tuple(fed),
        threads=(row(1), row(1), row(2), row(2), row(2)),
        info={"dataset": "/data/x.hs", "mode": "mmap"},
    )
    return dataclasses.replace(base, **changes)


def row(kind: int, stage: Stage = Stage.IDLE, since: float = 0.0, path: str = "", **totals: int) -> ThreadRow:
    """A thread's row: ``since`` in seconds after ``START``, totals by the counters' names in small letters."""
    values = [0] * 32
    values[ThreadCounter.TID], values[ThreadCounter.KIND] = 1, kind
    values[ThreadCounter.STAGE], values[ThreadCounter.SINCE] = stage, START + int(since * 1e9)
    for name, value in totals.items():
        values[ThreadCounter[name.upper()]] = value
    return ThreadRow(tuple(values), path)
