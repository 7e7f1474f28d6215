"""Slots as the client keeps them, filled batches as it hands them out, and what must be closed in the end."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hsloader.monitor.counters import TrainerCounter
from hsloader.reader.batch import BadSample
from hsloader.reader.hosts import Host
from hsloader.reader.ring import Completion, Request, Ring

__all__ = ["Filled", "Prepared", "Slot", "SpanKind", "State", "watch_forks"]

# What a span of a field looks like: the bits' type, bytes of a row, shape of a row.
SpanKind = tuple[np.dtype[np.generic], int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Filled:
    """A batch that is there.

    ``memory``: the whole slot, uint8, page-aligned, whole pages; (``ring``, ``slot``) identifies it for registration
    with CUDA: ``ring`` only changes when a dead feeder left a thread behind. Span f is ``rows[f]`` rows of field f from
    byte ``offsets[f]`` on. ``bad``: samples whose rows are zero as they could not be had. ``fill_seconds``: from the
    feeder taking the request to the batch being there.
    """

    key: int
    ring: int
    slot: int
    memory: npt.NDArray[np.uint8]
    offsets: tuple[int, ...]
    rows: tuple[int, ...]
    kinds: Sequence[SpanKind]
    bad: tuple[BadSample, ...]
    fill_seconds: float

    def span(self, number: int) -> npt.NDArray[Any]:
        """The rows of a span as bits ``[rows, *field.shape]`` (see ``DType.bits``), a writable view of the slot."""
        bits, width, shape = self.kinds[number]
        offset, rows = self.offsets[number], self.rows[number]
        return self.memory[offset : offset + rows * width].view(bits).reshape(rows, *shape)

    @property
    def spans(self) -> tuple[npt.NDArray[Any], ...]:
        """Every span, in the order of the fields."""
        return tuple(self.span(number) for number in range(len(self.rows)))


class Prepared(NamedTuple):
    """A request ready to be written: where its spans lie in the slot, their rows, and what the feeder is told."""

    offsets: tuple[int, ...]
    rows: tuple[int, ...]
    blob: bytes


class Slot:
    """A place in the ring for one batch. Whether it is asked and done is in the ring, not here."""

    __slots__ = (
        "attempts", "blob", "holds", "key", "number", "offsets", "open", "received", "ring", "ring_number", "rows",
    )  # fmt: skip

    def __init__(self, ring: Ring, ring_number: int, number: int) -> None:
        self.ring = ring
        self.ring_number = ring_number
        self.number = number
        self.key = 0
        self.offsets: tuple[int, ...] = ()
        self.rows: tuple[int, ...] = ()
        self.blob = b""
        self.holds: set[int] = set()
        self.attempts = 0  # feeders that died while this was asked
        self.received = False
        self.open = True  # False: the answer to what was asked last was seen, so that the ring need not be read

    @property
    def serial(self) -> int:
        """The serial of what was asked last; 0 before."""
        request = self.ring.request(self.number)
        return request.serial if request is not None else 0

    def ask(self, key: int, offsets: Sequence[int], rows: Sequence[int], blob: bytes) -> None:
        """Note what is to be asked."""
        self.key, self.offsets, self.rows, self.blob = key, tuple(offsets), tuple(rows), blob
        self.attempts, self.received = 0, False

    def take_over(self, other: Slot) -> None:
        """Ask here what was asked in ``other``."""
        self.ask(other.key, other.offsets, other.rows, other.blob)
        self.attempts = other.attempts

    def write(self, serial: int, generation: int) -> None:
        """Ask for it in the ring."""
        self.open = True
        self.ring.write_request(self.number, serial, self.key, generation, self.blob)

    def completion(self) -> Completion | None:
        """What became of what was asked last; None if that is open, or nothing was asked."""
        request = self.ring.request(self.number)
        return None if request is None else self._answered(request)

    def acknowledged(self) -> bool:
        """Whether the feeder will not touch the slot: it answered what was asked, or nothing was."""
        if self.open:
            request = self.ring.request(self.number)
            self.open = request is not None and self._answered(request) is None
        return not self.open

    def _answered(self, request: Request) -> Completion | None:
        completion = self.ring.completion(self.number)
        return completion if completion is not None and completion.serial == request.serial else None

    def answer(self, completion: Completion) -> bytes:
        """The bytes that came with a completion."""
        request: Request | None = self.ring.request(self.number)
        return self.ring.completion_blob(request, completion) if request is not None and completion.blob_bytes else b""

    def filled(self, kinds: Sequence[SpanKind], bad: tuple[BadSample, ...], completion: Completion) -> Filled:
        """The batch as it lies in the slot."""
        memory = self.ring.slot(self.number)
        seconds = (completion.finished - completion.started) / 1e9
        return Filled(self.key, self.ring_number, self.number, memory, self.offsets, self.rows, kinds, bad, seconds)


class State:
    """What a client must close: its host and its ring. Knows no client, so that a client can be collected."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.host: Host | None = None
        self.owner = os.getpid()
        self.closed = False

    def shut(self) -> None:
        """End the feeder and close the descriptors; in a forked child, whose feeder it is not, only the latter."""
        self.closed = True
        if self.owner == os.getpid():
            self.ring.trainer[TrainerCounter.CLOSED_AT] = time.monotonic_ns()
        if self.host is not None:
            self.host.close()
        self.ring.close()


_states: weakref.WeakSet[State] = weakref.WeakSet()


def watch_forks(state: State) -> None:
    """Have a forked child close its copies of the descriptors, or the feeder would not see its trainer hang up."""
    _states.add(state)


def _leave() -> None:
    for state in list(_states):
        state.shut()


os.register_at_fork(after_in_child=_leave)
