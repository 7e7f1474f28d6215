"""Where what lies in the ring, and a copy of its header at one moment: all that a monitor needs to know of the reader.

::

    page 0          the shape (what is where), written once
    counters        trainer, feeder, one row a feeder thread (with the path it works on)
    info            two JSON texts about the loader: the trainer's, the feeder's
    requests        one record a slot, written by the trainer only
    completions     one record a slot, written by the feeder only
    areas           one a slot: the request's pieces, later the feeder's list of bad samples
    slots           one a batch: page-aligned, one contiguous span a field
    (tail)          areas of batches with more pieces than was foreseen

The file has no name in any directory; others of the same user find ``/memfd:hsloader-ring`` among ``/proc/PID/fd``.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crc32c import crc32c

from hsloader.monitor.counters import OWN_COUNTERS, WAIT_CLASSES, FeederCounter, Stage, ThreadCounter, TrainerCounter

__all__ = [
    "MEMFD_NAME",
    "OtherVersionError",
    "RingShape",
    "Snapshot",
    "ThreadRow",
    "read_shape",
    "take_snapshot",
    "unpack_info",
]

MEMFD_NAME = "hsloader-ring"
MAGIC = b"HSLRING\0"
VERSION = 1

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
LARGE = 64 << 20  # from here on rounding a slot to huge pages costs little
COUNTERS = 64  # int64 places of the trainer and of the feeder
ROW = 512  # bytes of a thread's row: 32 counters, then the path it works on
ROW_COUNTERS = 32
INFO = 8192
RECORD = 128
SHAPE = struct.Struct("<8sIIIIQQQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShape:
    """Sizes that fix where everything lies: slots of ``slot_bytes``, areas of ``area_bytes``, rows for threads."""

    slots: int
    slot_bytes: int
    area_bytes: int
    threads: int
    # Where things lie, worked out once: they are asked for in every next().
    feeder_at: int = field(init=False, repr=False, compare=False)
    """Offset of the feeder's counters; the trainer's lie before them."""
    threads_at: int = field(init=False, repr=False, compare=False)
    """Offset of the threads' rows."""
    info_at: int = field(init=False, repr=False, compare=False)
    """Offset of the trainer's info; the feeder's follows."""
    requests_at: int = field(init=False, repr=False, compare=False)
    """Offset of the requests."""
    completions_at: int = field(init=False, repr=False, compare=False)
    """Offset of the completions."""
    areas_at: int = field(init=False, repr=False, compare=False)
    """Offset of the areas; what lies before is the header that both sides map."""
    slots_at: int = field(init=False, repr=False, compare=False)
    """Offset of the first slot."""
    file_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of the file without its tail."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.slot_bytes < PAGE or self.slot_bytes % PAGE or self.area_bytes % 64:
            raise ValueError(f"a ring cannot have this shape: {self}")
        feeder_at = PAGE + COUNTERS * 8
        threads_at = feeder_at + COUNTERS * 8
        info_at = threads_at + self.threads * ROW
        requests_at = info_at + 2 * INFO
        completions_at = requests_at + self.slots * RECORD
        areas_at = -(-(completions_at + self.slots * RECORD) // PAGE) * PAGE
        unit = HUGE_PAGE if self.slot_bytes >= LARGE else PAGE
        slots_at = -(-(areas_at + self.slots * self.area_bytes) // unit) * unit
        places = {
            "feeder_at": feeder_at,
            "threads_at": threads_at,
            "info_at": info_at,
            "requests_at": requests_at,
            "completions_at": completions_at,
            "areas_at": areas_at,
            "slots_at": slots_at,
            "file_bytes": slots_at + self.slots * self.slot_bytes,
        }
        for name, place in places.items():
            object.__setattr__(self, name, place)  # frozen for everybody else

    @staticmethod
    def round_slot(size: int) -> int:
        """``size`` rounded up to what a slot may have: whole pages, whole huge pages from 64 MiB on."""
        unit = HUGE_PAGE if size >= LARGE else PAGE
        return max(unit, -(-size // unit) * unit)


REQUEST = struct.Struct("<QqQQQQI")  # serial, key, generation, area offset, area bytes, blob bytes, blob crc
COMPLETION = struct.Struct("<QQQQQQQI")  # serial, status, bad, blob bytes, started, finished, decoded bytes, blob crc
CHECK = struct.Struct("<I")  # the crc32c behind each record

_MOST_HEADER = 64 << 20  # bytes; no ring has slots for more, and a monitor copies the whole header

FILLED = 1  # the status of a completion whose slot holds its batch


class OtherVersionError(ValueError):
    """A ring that another version of hsloader made."""


def read_shape(fd: int) -> RingShape:
    """The shape of the ring in the file open at ``fd``.

    ``ValueError`` if it is no ring, ``OtherVersionError`` if it is one that this version cannot read.
    """
    data = os.pread(fd, SHAPE.size, 0)
    if len(data) < SHAPE.size:
        raise ValueError(f"descriptor {fd} is no ring: it holds {len(data)} bytes")
    magic, version, slots, threads, _, slot_bytes, area_bytes, file_bytes = SHAPE.unpack(data)
    if magic != MAGIC:
        raise ValueError(f"descriptor {fd} is no ring: it begins with {magic!r}")
    if version != VERSION:
        raise OtherVersionError(
            f"descriptor {fd} is a ring of version {version}; this hsloader reads version {VERSION}"
        )
    shape = RingShape(slots=slots, slot_bytes=slot_bytes, area_bytes=area_bytes, threads=threads)
    if shape.file_bytes != file_bytes or shape.areas_at > _MOST_HEADER or os.fstat(fd).st_size < file_bytes:
        raise ValueError(f"the ring at descriptor {fd} contradicts itself: {shape}, {file_bytes} bytes")
    return shape


def unpack_record(data: bytes | memoryview, layout: struct.Struct) -> tuple[int, ...] | None:
    """The values of a request or completion, or None: nothing was written yet, or it is being written."""
    record = data[: layout.size]
    if crc32c(record) != CHECK.unpack_from(data, layout.size)[0]:
        return None
    values = layout.unpack(record)
    return values if values[0] else None


def unpack_info(data: bytes) -> dict[str, Any]:
    """The JSON object of one of the two info texts; empty while it is being written."""
    length, crc = struct.unpack_from("<II", data)
    text = data[8 : 8 + min(length, INFO - 8)]
    if not length or crc32c(text) != crc:
        return {}
    try:
        info = json.loads(text)
    except (ValueError, RecursionError):  # another process's memory may hold anything
        return {}
    return info if isinstance(info, dict) else {}


@dataclass(frozen=True, slots=True)
class ThreadRow:
    """One thread of the feeder: its counters and the file it works on, relative to the dataset."""

    counters: tuple[int, ...]
    path: str

    def __getitem__(self, counter: ThreadCounter) -> int:
        return self.counters[counter]

    @property
    def stage(self) -> Stage:
        """What it does."""
        value = self.counters[ThreadCounter.STAGE]
        return Stage(value) if value in Stage.__members__.values() else Stage.IDLE


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ring's header at one moment: plain numbers, whoever took them. ``at`` is an instant of time.monotonic_ns."""

    at: int
    slots: int
    slot_bytes: int
    trainer: tuple[int, ...]
    feeder: tuple[int, ...]
    threads: tuple[ThreadRow, ...] = ()
    asked: tuple[tuple[int, int], ...] = ()
    """(serial, generation) of the request in each slot that has one."""
    filled: frozenset[int] = frozenset()
    """Serials of the requests whose slots are filled."""
    given_up: frozenset[int] = frozenset()
    """Serials of the requests that ended otherwise: cancelled, or the feeder failed over them."""
    info: Mapping[str, Any] = field(default_factory=dict)
    feeder_info: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, counter: TrainerCounter | FeederCounter) -> int:
        return (self.trainer if isinstance(counter, TrainerCounter) else self.feeder)[counter]

    def total(self, counter: ThreadCounter) -> int:
        """A thread counter summed over the threads."""
        return sum(row.counters[counter] for row in self.threads)

    @property
    def helpers(self) -> tuple[int, ...]:
        """Process ids of the processes that decode beside the feeder."""
        places = range(FeederCounter.HELPERS, FeederCounter.HELPERS + 4)
        return tuple(self.feeder[place] for place in places if self.feeder[place])

    @property
    def last_looks(self) -> tuple[tuple[int, int], ...]:
        """Process id and instant of the last look at the requests, for the feeder and each of its helpers."""
        looks = self.feeder[FeederCounter.LOOKS : FeederCounter.LOOKS + 1 + len(self.helpers)]
        found = tuple(zip((self[FeederCounter.PID], *self.helpers), looks, strict=True))
        return tuple(look for look in found if look[1]) or ((self[FeederCounter.PID], self[FeederCounter.SEEN_AT]),)

    @property
    def waits(self) -> tuple[int, ...]:
        """How many ``next()`` there were in each class of duration."""
        return self.trainer[TrainerCounter.WAITS : TrainerCounter.WAITS + WAIT_CLASSES]

    @property
    def ready(self) -> int:
        """Batches that are read and that the trainer has not taken yet."""
        newest, generation = self[TrainerCounter.LAST_SERIAL], self[TrainerCounter.GENERATION]
        return sum(s > newest and g == generation and s in self.filled for s, g in self.asked)

    @property
    def reading(self) -> int:
        """Batches that are asked for and not read yet."""
        generation = self[TrainerCounter.GENERATION]
        return sum(g == generation and s not in self.filled and s not in self.given_up for s, g in self.asked)


def _summed(feeder: tuple[int, ...]) -> tuple[int, ...]:
    """The feeder's counters, with those that each of its engines writes for itself summed."""
    first, parts = FeederCounter.TAKEN, feeder[FeederCounter.PARTS :]
    sums = (sum(parts[place::OWN_COUNTERS]) for place in range(OWN_COUNTERS))
    return (*feeder[:first], *sums, *feeder[first + OWN_COUNTERS :])


def take_snapshot(fd: int, shape: RingShape | None = None) -> Snapshot:
    """Copy the header of the ring open at ``fd``: two reads, some 20 KB. ``ValueError`` if it is no ring."""
    shape = shape or read_shape(fd)
    data = os.pread(fd, shape.areas_at, 0)
    now = time.monotonic_ns()
    if len(data) < shape.areas_at:
        raise ValueError(f"descriptor {fd} is no ring: its header ends after {len(data)} bytes")
    layout = f"<{COUNTERS}q"
    rows = []
    for at in range(shape.threads_at, shape.info_at, ROW):
        path = data[at + ROW_COUNTERS * 8 : at + ROW].split(b"\0", 1)[0]
        rows.append(ThreadRow(struct.unpack_from(f"<{ROW_COUNTERS}q", data, at), path.decode(errors="replace")))
    requests = [_record(data, shape.requests_at + i * RECORD, REQUEST) for i in range(shape.slots)]
    completions = [_record(data, shape.completions_at + i * RECORD, COMPLETION) for i in range(shape.slots)]
    return Snapshot(
        at=now,
        slots=shape.slots,
        slot_bytes=shape.slot_bytes,
        trainer=struct.unpack_from(layout, data, PAGE),
        feeder=_summed(struct.unpack_from(layout, data, shape.feeder_at)),
        threads=tuple(row for row in rows if row.counters[ThreadCounter.KIND]),
        asked=tuple((r[0], r[2]) for r in requests if r is not None),
        filled=frozenset(c[0] for c in completions if c is not None and c[1] == FILLED),
        given_up=frozenset(c[0] for c in completions if c is not None and c[1] != FILLED),
        info=unpack_info(data[shape.info_at : shape.info_at + INFO]),
        feeder_info=unpack_info(data[shape.info_at + INFO : shape.info_at + 2 * INFO]),
    )


def _record(data: bytes, at: int, layout: struct.Struct) -> tuple[int, ...] | None:
    return unpack_record(data[at : at + RECORD], layout)
