"""The way of a batch from the ring into the memory of a GPU: side stream, cast, noise, and when a slot is free again.

The rules, each of which has cost somebody a corrupted batch:

* A batch's memory is allocated on the stream that is current in ``next()``.  The side stream waits for that stream
  (its allocator may hand out memory that earlier work there still reads), then copies.
* The stream that is current at hand-out waits for the copy.  Only if it is another one is ``record_stream`` needed.
* A slot is free when the event behind its copy has completed, which ``query()`` tells: the host never waits.
* A batch that was sent and is not wanted any more keeps its memory until that event, too.
* The ring is registered with CUDA slot by slot, as they are first used, and unregistered before it is unmapped; one
  that the client replaced, as soon as no copy reads it.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.batches.noise import GaussianNoise, UniformNoise
from hsloader.batches.states import restored, torch_dtype
from hsloader.errors import LoaderError
from hsloader.reader.lease import Filled
from hsloader.store.fields import Field

__all__ = ["CudaDriver", "Driver", "Parcel", "SpanPlan", "Transfers", "add_noise", "part_of"]

_ALIGNMENT = 512
_PORTABLE = 1  # cudaHostRegisterPortable: registered for every CUDA context of the process
_ALREADY_REGISTERED = 712


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """What becomes of a span on its way: its dtype in the batch, the span with its fp8 scales, whether it is noised."""

    name: str
    field: Field
    dtype: torch.dtype
    scale: str | None
    noisy: bool

    @property
    def stored(self) -> torch.dtype:
        """Its dtype in the ring."""
        return torch_dtype(self.field.dtype)

    @property
    def changes(self) -> bool:
        """Whether its values are not simply copied."""
        return self.noisy or self.dtype != self.stored


class Driver(Protocol):
    """The part of CUDA that a transfer needs; streams and events are whatever the driver makes of them."""

    side: Any

    @property
    def uuid(self) -> str:
        """The device's UUID, as ``01234567-89ab-cdef-0123-456789abcdef``; empty where torch does not tell it."""

    def check_not_capturing(self) -> None:
        """Raise ``LoaderError`` while the current stream is captured into a graph."""

    def current(self) -> Any:
        """The current stream."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory, allocated on the current stream."""

    def pinned(self, size: int) -> torch.Tensor:
        """uint8 host memory that a copy may read asynchronously, reused once copies from it are over."""

    def event(self, *, timed: bool = False) -> Any:
        """A new event."""

    def record(self, event: Any, stream: Any) -> None:
        """The event completes when what the stream holds now is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream gets from now on waits for the event."""

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """Call ``work`` with ``stream`` current."""

    def completed(self, event: Any) -> bool:
        """Whether the event has completed; never waits."""

    def synchronize(self, event: Any) -> None:
        """Wait for the event."""

    def milliseconds(self, first: Any, last: Any) -> float:
        """Time between two completed, timed events."""

    def used_on(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that a stream other than the one of the allocation uses the tensor."""

    def generator(self, seed: int) -> torch.Generator:
        """A generator of the device, of that seed."""

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Let the device read this host memory directly."""

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Undo ``register``."""


class CudaDriver:
    """CUDA through torch, on one device."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise LoaderError(f"device={str(device)!r}: torch sees no CUDA device; use device='cpu'")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._generator = torch.Generator(self.device)

    @property
    def uuid(self) -> str:
        """See ``Driver``."""
        return str(getattr(torch.cuda.get_device_properties(self.device), "uuid", ""))

    def check_not_capturing(self) -> None:
        """See ``Driver``."""
        if torch.cuda.is_current_stream_capturing():
            raise LoaderError(
                "next() of a loader while a CUDA graph is captured: the graph would replay the copy of this one batch; "
                "fetch batches outside the capture and copy them into the graph's static inputs"
            )

    def current(self) -> torch.cuda.Stream:
        """See ``Driver``."""
        return torch.cuda.current_stream(self.device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See ``Driver``."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def pinned(self, size: int) -> torch.Tensor:
        """See ``Driver``."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def event(self, *, timed: bool = False) -> torch.cuda.Event:
        """See ``Driver``."""
        return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """See ``Driver``."""
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See ``Driver``."""
        stream.wait_event(event)

    def run(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """See ``Driver``."""
        with cast(AbstractContextManager[None], torch.cuda.stream(stream)):
            work()

    def completed(self, event: torch.cuda.Event) -> bool:
        """See ``Driver``."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: torch.cuda.Event) -> None:
        """See ``Driver``."""
        event.synchronize()

    def milliseconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """See ``Driver``."""
        return float(first.elapsed_time(last))

    def used_on(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """See ``Driver``."""
        tensor.record_stream(stream)

    def generator(self, seed: int) -> torch.Generator:
        """See ``Driver``."""
        return self._generator.manual_seed(seed)

    def register(self, memory: NDArray[np.uint8]) -> None:
        """See ``Driver``."""
        with torch.cuda.device(self.device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))
            if status == _ALREADY_REGISTERED:
                # By a call that ctrl-C cut short, or what lay at this address before still is, whose pages copies would
                # read instead of these.
                cudart.cudaHostUnregister(memory.ctypes.data)
                status = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))
        if status != 0:
            raise LoaderError(
                f"cudaHostRegister of {memory.nbytes:,} bytes failed with CUDA error {status}; if locked memory is "
                "limited (ulimit -l, the container's memory limit), give a smaller ReadOptions(prefetch=...)"
            )

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """See ``Driver``."""
        with torch.cuda.device(self.device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(memory.ctypes.data)


class Parcel:
    """A batch under way.  Whoever reads its slot must keep it until the slot is not read any more."""

    def __init__(self, stream: Any, events: _Events) -> None:
        self.stream = stream
        self.events = events
        self.sent = False
        self.over = False  # the transfer was seen to have ended
        self.taken = False  # the batch was handed out
        self.place = (0, 0)  # (ring, slot) that it is copied from
        self.bytes = 0
        self.spans: dict[str, torch.Tensor] = {}
        self.host: dict[str, torch.Tensor] = {}


class _Events:
    """What a parcel needs of events; used again by later parcels."""

    __slots__ = ("done", "ready", "started")

    def __init__(self, driver: Driver) -> None:
        self.ready = driver.event()
        self.started = driver.event(timed=True)
        self.done = driver.event(timed=True)


@dataclass(frozen=True, slots=True)
class _Move:
    """Spans ``first`` to ``last`` (numbers) that travel in one copy, as they lie side by side and stay as they are."""

    first: int
    last: int


def _moves(plans: Sequence[SpanPlan]) -> list[_Move]:
    """The copies of a batch: states in one, what is small in another.

    Apart, as a script may collect its masks, and would keep the states with them. Spans that change their dtype are
    in none.
    """
    moves: list[_Move] = []
    kinds = [(plan.dtype != plan.stored, plan.field.is_token_field) for plan in plans]
    for number, (changes, small) in enumerate(kinds):
        if changes:
            continue
        if moves and moves[-1].last == number - 1 and kinds[number - 1] == (changes, small):
            moves[-1] = _Move(moves[-1].first, number)
        else:
            moves.append(_Move(number, number))
    return moves


class _Memory:
    """What must be undone when the transfers end: apart from them, so that they can be collected."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.owner = os.getpid()
        self.moving: list[Parcel] = []
        self.registered: dict[tuple[int, int], tuple[NDArray[np.uint8], torch.Tensor]] = {}
        self.replaced: set[tuple[int, int]] = set()  # those of rings that a newer one has replaced

    def register(self, place: tuple[int, int], memory: NDArray[np.uint8]) -> None:
        """Register a slot.  A place in a newer ring than any before makes all others places in a replaced one."""
        self.driver.register(memory)
        self.registered[place] = memory, torch.from_numpy(memory)
        newest = max(ring for ring, _ in self.registered)
        self.replaced = {known for known in self.registered if known[0] < newest}

    def forget_replaced(self) -> None:
        """Unregister the slots of replaced rings that nothing moves from; a batch may still come from one later."""
        for place in self.replaced - {parcel.place for parcel in self.moving}:
            self.replaced.discard(place)
            # Kept until it is unregistered, as this may be all that keeps it mapped.
            memory = self.registered.pop(place, None)
            if memory is not None:
                self.driver.unregister(memory[0])

    def mark(self, parcel: Parcel) -> None:
        """Give a parcel whose sending was interrupted its event: behind whatever was started of it."""
        if not parcel.sent:
            parcel.bytes = 0
            self.driver.record(parcel.events.done, self.driver.side)
            parcel.sent = True

    def shut(self) -> None:
        if self.owner != os.getpid():  # CUDA does not survive a fork, and all of this is the parent's
            self.moving.clear()
            self.registered.clear()
            return
        try:
            for parcel in self.moving:
                self.mark(parcel)
                self.driver.synchronize(parcel.events.done)
        finally:  # also if CUDA is broken by then: memory must not be unmapped before
            self.moving.clear()
            while self.registered:
                self.driver.unregister(self.registered.popitem()[1][0])


class Transfers:
    """Sends batches to a device in few copies: one of the states, one of what is small, one of the host's arrays.

    ``plans``: the spans in the order of the ring's.  ``moved`` is called with (nanoseconds, bytes) of each transfer
    that is over.
    """

    def __init__(
        self,
        driver: Driver,
        plans: Sequence[SpanPlan],
        noise: UniformNoise | GaussianNoise | None,
        moved: Callable[[int, int], None],
    ) -> None:
        self._driver = driver
        self._plans = tuple(plans)
        self._noise = noise
        self._moved = moved
        self._moves = _moves(self._plans)
        self._recast = [number for number, plan in enumerate(self._plans) if plan.dtype != plan.stored]
        self._events: list[_Events] = []
        self._memory = _Memory(driver)
        self._finalizer = weakref.finalize(self, _Memory.shut, self._memory)

    @property
    def moving(self) -> int:
        """Transfers whose end was not seen yet."""
        return len(self._memory.moving)

    def check_not_capturing(self) -> None:
        """Raise ``LoaderError`` during graph capture, before anything that CUDA forbids then, as asking an event."""
        self._driver.check_not_capturing()

    def register(self, place: tuple[int, int], memory: NDArray[np.uint8]) -> None:
        """Let the device read a slot, if it could not before.

        That takes 0.4 s a GiB, which are best spent while the slot is being filled.
        """
        if place not in self._memory.registered:
            self._memory.register(place, memory)

    def prepare(self) -> Parcel:
        """A parcel for a batch, kept from now on until its transfer is over.

        Whoever has the slot's lease hang on the parcel's life can be interrupted anywhere.
        """
        return Parcel(self._driver.current(), self._events.pop() if self._events else _Events(self._driver))

    def send(
        self,
        parcel: Parcel,
        filled: Filled,
        *,
        host: Mapping[str, NDArray[np.generic]],
        noisy: Sequence[NDArray[np.int64] | None],
        seed: int,
    ) -> None:
        """Start the copies of a batch.

        ``host``: small arrays; ``noisy[i]``: int64 [runs, 2] rows of span i that get noise, None for none; ``seed`` of
        the noise.
        """
        driver, events = self._driver, parcel.events
        copies, casts = self._placed(parcel, filled)
        if host:
            copies.append(self._packed(parcel, host))
        spans = parcel.spans

        def work() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            for plan, source in casts:
                # What is only staged here is allocated, used and freed on the side stream.
                staged = torch.empty_like(source, device=spans[plan.name].device).copy_(source, non_blocking=True)
                restored(staged, plan.dtype, spans[plan.scale] if plan.scale else None, out=spans[plan.name])
            if self._noise is not None:
                generator = driver.generator(seed)
                for plan, runs in zip(self._plans, noisy, strict=True):
                    if runs is not None:
                        add_noise(self._noise, spans[plan.name], runs, generator)

        self._memory.moving.append(parcel)  # first: what an interrupted call has started is waited for, too
        driver.record(events.ready, parcel.stream)
        driver.wait(driver.side, events.ready)
        driver.record(events.started, driver.side)
        driver.run(driver.side, work)
        driver.record(events.done, driver.side)
        parcel.sent = True

    def hand_out(self, parcel: Parcel) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(spans, host arrays) of a parcel on the device, for the stream that is current now."""
        driver = self._driver
        stream = driver.current()
        if not parcel.over:
            driver.wait(stream, parcel.events.done)
        spans, host = parcel.spans, parcel.host
        if stream != parcel.stream:
            for tensor in (*spans.values(), *host.values()):
                driver.used_on(tensor, stream)
        parcel.spans, parcel.host = {}, {}  # the caller's alone: dropped early, the memory is free early
        parcel.taken = True
        if parcel.over:
            self._events.append(parcel.events)
        return spans, host

    def retire(self) -> None:
        """Let go of the parcels whose transfer is over, and with them of their slots."""
        memory, driver = self._memory, self._driver
        still: list[Parcel] = []
        over: list[Parcel] = []
        for parcel in memory.moving:
            memory.mark(parcel)
            (over if driver.completed(parcel.events.done) else still).append(parcel)
        memory.moving[:] = still
        for parcel in over:
            parcel.over = True
            if parcel.bytes:
                self._moved(int(driver.milliseconds(parcel.events.started, parcel.events.done) * 1e6), parcel.bytes)
            if parcel.taken:
                self._events.append(parcel.events)
        if memory.replaced:
            memory.forget_replaced()

    def close(self) -> None:
        """Wait for what is under way and unregister the ring.  Call it before the ring goes."""
        self._finalizer()

    def _placed(
        self, parcel: Parcel, filled: Filled
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[SpanPlan, torch.Tensor]]]:
        """Give the spans their places on the device: (to, from) of the copies, and what is cast on its way."""
        driver, plans = self._driver, self._plans
        whole = self._registered(filled)
        parcel.place = filled.ring, filled.slot
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        casts: list[tuple[SpanPlan, torch.Tensor]] = []
        for move in self._moves:
            start = filled.offsets[move.first]
            stop = filled.offsets[move.last] + filled.rows[move.last] * plans[move.last].field.row_bytes
            block = driver.empty((stop - start,), torch.uint8)
            copies.append((block, whole[start:stop]))
            for number in range(move.first, move.last + 1):
                plan, shape = plans[number], (filled.rows[number], *plans[number].field.shape)
                parcel.spans[plan.name] = part_of(block, filled.offsets[number] - start, plan.dtype, shape)
            parcel.bytes += stop - start
        for number in self._recast:
            plan, shape = plans[number], (filled.rows[number], *plans[number].field.shape)
            source = part_of(whole, filled.offsets[number], plan.stored, shape)
            parcel.spans[plan.name] = driver.empty(shape, plan.dtype)
            parcel.bytes += source.nbytes
            casts.append((plan, source))
        return copies, casts

    def _registered(self, filled: Filled) -> torch.Tensor:
        """The slot as a tensor of uint8, registered with CUDA."""
        place = filled.ring, filled.slot
        self.register(place, filled.memory)
        return self._memory.registered[place][1]

    def _packed(self, parcel: Parcel, host: Mapping[str, NDArray[np.generic]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Put small arrays side by side in pinned memory, and give them their places on the device: one copy."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in host.items()}
        ends = np.cumsum([-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]).tolist()
        packed = self._driver.pinned(ends[-1])
        target = self._driver.empty((ends[-1],), torch.uint8)
        for (name, tensor), offset in zip(tensors.items(), [0, *ends[:-1]], strict=True):
            shape = tuple(tensor.shape)
            part_of(packed, offset, tensor.dtype, shape).copy_(tensor)
            parcel.host[name] = part_of(target, offset, tensor.dtype, shape)
        parcel.bytes += ends[-1]
        return target, packed


def part_of(whole: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that lies at ``offset`` of memory (uint8)."""
    return whole[offset : offset + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)


def add_noise(
    noise: UniformNoise | GaussianNoise, states: torch.Tensor, runs: NDArray[np.int64], generator: torch.Generator
) -> None:
    """Add noise in place to the rows ``runs`` (int64 [n, 2]: first row, number of rows) of ``states``.

    As speculators' ``AddUniformNoise`` and ``AddGaussianNoise``, drawn in the dtype of the states.
    """
    for first, count in _merged(runs):
        rows = states[first : first + count]
        drawn = torch.empty_like(rows)
        if isinstance(noise, UniformNoise):
            drawn.uniform_(generator=generator).sub_(0.5).mul_(2 * noise.std)
        else:
            drawn.normal_(generator=generator).mul_(noise.std)
        rows.add_(drawn)


def _merged(runs: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Runs of rows, neighbouring ones joined."""
    merged: list[tuple[int, int]] = []
    for first, count in runs[np.argsort(runs[:, 0], kind="stable")].tolist():
        if merged and merged[-1][0] + merged[-1][1] == first:
            merged[-1] = merged[-1][0], merged[-1][1] + count
        else:
            merged.append((first, count))
    return merged
