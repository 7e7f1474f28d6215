"""The counters in the ring's header: their names, units and places. The reader writes them, all of ``monitor`` reads.

Every counter is one int64 with a single writer, so nothing locks and a reader in another process sees whole numbers.
Totals count since the loader opened, across restarts of the feeder; times are nanoseconds, instants are those of
``time.monotonic_ns`` (one clock for all processes of a machine), sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

__all__ = [
    "OWN_COUNTERS",
    "WAIT_CLASSES",
    "FeederCounter",
    "Stage",
    "ThreadCounter",
    "TrainerCounter",
    "count_wait",
    "wait_class",
    "wait_quantile",
]


OWN_COUNTERS = 8  # of an engine, from TAKEN on: see FeederCounter.PARTS


class TrainerCounter(IntEnum):
    """Written by the trainer's process: the client the first, the loader those from ``SAMPLES`` on."""

    GENERATION = 0  # raised by every new iteration; requests of an older one are cancelled
    REQUESTED = 1  # batches asked for
    RECEIVED = 2  # batches that wait() or look() handed out
    CANCELLED = 3  # batches that were asked for and then forgotten
    WAIT_NS = 4  # time inside wait() and wait_free()
    LAST_WAIT_NS = 5  # of the last batch handed out
    WAITING_SINCE = 6  # instant at which the running wait() began, 0 outside
    WAITING_SERIAL = 7  # the request that the running wait() waits for
    LAST_CALL = 8  # instant of the last submit(), wait() or look()
    RESTARTS = 9  # feeders that died and were started again
    BAD_SAMPLES = 10  # samples reported bad
    FEEDER_PID = 11  # 0 in a reader inside the trainer's process and between feeders
    STARTED_AT = 12  # instant at which the client started
    SLOTS_BUSY = 13  # slots asked for, filled or held by the trainer
    LAST_SERIAL = 14  # the newest request whose batch wait() handed out
    CLOSED_AT = 15  # instant at which the client was closed; the memory may outlive it
    SAMPLES = 16  # samples handed out
    TOKENS = 17  # tokens handed out, without padding
    ROWS = 18  # rows handed out, with padding
    BATCHES = 19  # batches handed out to the script
    TRANSFER_NS = 20  # host-to-device copies, from the events of one in eight
    TRANSFER_BYTES = 21
    EPOCH = 22
    POSITION = 23  # batches of the epoch that were handed out
    EPOCH_BATCHES = 24  # batches of this epoch on this rank
    NEXT_NS = 25  # time inside next()
    NEXT_SINCE = 26  # instant at which the running next() began, 0 outside
    SKIPPED = 27  # bad samples that on_bad="skip" left out
    LAST_NEXT_NS = 28  # time inside the last next() that gave a batch, however many wait() it took
    FIRST_NEXT_NS = 29  # of that, of the iteration's first batch
    WAITS = 32  # to 63: how many next() took [2**(i-1), 2**i) microseconds, i from 0 (under one) to 31


class FeederCounter(IntEnum):
    """Written by the feeder."""

    PID = 0
    STARTED_AT = 1  # instant at which its main function began
    READY_AT = 2  # instant at which it took its first look at the requests
    SEEN_AT = 3  # instant of its last look
    TAKEN = 4  # requests taken
    FILLED = 5  # batches filled
    CANCELLED = 6  # batches given back unread or half read
    FILL_NS = 7  # from taking a request to filling it, summed
    OPEN_SHARDS = 8  # shard files that are open
    PREFAULTED = 9  # bytes of the ring whose pages exist
    QUEUED_READS = 10  # reads that no thread has begun
    QUEUED_DECODES = 11  # reads that are done and wait for a decoder
    DECODERS = 12  # decode threads
    READERS = 13  # read threads
    HELPERS = 16  # to 19: process ids of the processes that decode beside the feeder, 0 where there is none
    LOOKS = 20  # to 23: instant of each engine's own last look; SEEN_AT is the newest of them
    PARTS = 32  # to 63: TAKEN to QUEUED_DECODES as each engine writes them, eight an engine; a snapshot sums them


class Stage(IntEnum):
    """What a thread of the feeder does."""

    IDLE = 0  # waits for work
    PLAN = 1  # works out which chunks a batch needs
    INDEX = 2  # opens a shard and reads its index
    BUFFER = 3  # waits for a buffer: the decoders are behind
    READ = 4
    DECODE = 5
    DROP = 6  # gives pages back to the kernel


class ThreadCounter(IntEnum):
    """One row a thread of the feeder. What it does comes first, its totals from ``READS`` on."""

    TID = 0  # the kernel's thread id; 0: the row is unused
    KIND = 1  # 1 reads, 2 decodes
    STAGE = 2  # a Stage
    SINCE = 3  # instant at which the stage began
    SERIAL = 4  # the request it works for
    OFFSET = 5  # of the byte range in the shard file
    LENGTH = 6
    PROCESS = 7  # the process it belongs to: the feeder or one of its helpers
    READS = 8  # byte ranges read
    READ_BYTES = 9  # bytes asked of the file system (through mmap they may come from the page cache)
    READ_NS = 10
    INDEX_NS = 11
    BUFFER_NS = 12
    FRAMES = 13
    FRAME_BYTES = 14  # encoded
    DECODED_BYTES = 15
    DECODE_NS = 16
    CUT_FRAMES = 17  # decoded through scratch, as the batch wanted only part of the chunk
    TOKEN_HITS = 18  # token chunks found decoded
    ZEROED_BYTES = 19
    BAD_FRAMES = 20
    DROPPED_BYTES = 21  # bytes whose pages were given back


WAIT_CLASSES = 32


class _Counters(Protocol):
    def __getitem__(self, place: int, /) -> int: ...

    def __setitem__(self, place: int, value: int, /) -> None: ...


def count_wait(trainer: _Counters, nanoseconds: int) -> None:
    """Count one ``next()`` of so many nanoseconds in its class of ``TrainerCounter.WAITS``, and as the last one."""
    trainer[TrainerCounter.LAST_NEXT_NS] = nanoseconds
    trainer[TrainerCounter.WAITS + wait_class(nanoseconds)] += 1


def wait_class(nanoseconds: int) -> int:
    """The class of ``TrainerCounter.WAITS`` that a ``next()`` of so many nanoseconds falls into."""
    return min(WAIT_CLASSES - 1, (nanoseconds // 1000).bit_length())


def wait_quantile(classes: Sequence[int], share: float) -> float:
    """The time that ``share`` of the waits did not exceed, in seconds; 0 without any.

    ``classes`` are the 32 counts of ``TrainerCounter.WAITS`` (or differences of them).  Within its class a value is
    interpolated, so it is right within a factor of two.
    """
    total = sum(classes)
    if total <= 0:
        return 0.0
    wanted = share * total
    below = 0
    for number, count in enumerate(classes):
        if count and below + count >= wanted:
            low, high = (0.0, 1.0) if number == 0 else (2.0 ** (number - 1), 2.0**number)
            return (low + (high - low) * (wanted - below) / count) / 1e6
        below += count
    return 2.0 ** (WAIT_CLASSES - 1) / 1e6
