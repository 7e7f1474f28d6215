"""The way of a batch from the ring into the memory of a GPU: side stream, cast, noise, and when a slot is free again.

The rules, each of which has cost somebody a corrupted batch:

* A batch's memory is allocated on the stream that is current in ``next()``.  The side stream waits for that stream
  (its allocator may hand out memory that earlier work there still reads), then copies.
* The stream that is current at hand-out waits for the copy.  Only if it is another one is ``record_stream`` needed.
* A slot is free when the event behind its copy has completed, which ``query()`` tells: the host never waits.
* A batch that was sent and is not wanted any more keeps its memory until that event, too; and so does the pinned
  memory that its small arrays are packed into, which is used again.
* The ring is registered with CUDA slot by slot, as they are first used, and unregistered before it is unmapped; one
  that the client replaced, as soon as no copy reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsloader.batches.noise import GaussianNoise, UniformNoise
from hsloader.batches.states import restored
from hsloader.device.driver import Driver
from hsloader.device.noising import add_noise
from hsloader.device.packing import Packing, Part, part_of, strided, torch_dtype_of
from hsloader.device.parcels import Gear, Memory, Parcel
from hsloader.device.plans import Move, SpanPlan, moves_of
from hsloader.reader.lease import Filled

__all__ = ["Transfers"]

_TIMED = 8  # of so many transfers one is timed


class Transfers:
    """Sends batches to a device in few copies: one of the states, one of all that is small, which the host packs.

    ``plans``: the spans in the order of the ring's.  ``moved`` is called with (nanoseconds, bytes) of each transfer
    that is over; one in eight is timed, and the others are taken to be as fast as it was.
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
        self._moves = moves_of(self._plans)
        self._small = [(number, plan) for number, plan in enumerate(self._plans) if plan.is_small]
        self._recast = [
            (number, plan) for number, plan in enumerate(self._plans) if plan.dtype != plan.stored and not plan.is_small
        ]
        self._packing = Packing(())
        self._gear: list[Gear] = []
        self._sent = 0
        self._pace = 0.0  # nanoseconds a byte, of the last transfer that was timed
        self._sources: dict[tuple[tuple[int, int], int], tuple[tuple[int, int], torch.Tensor]] = {}
        self._memory = Memory(driver)
        self._finalizer = weakref.finalize(self, Memory.shut, self._memory)

    @property
    def moving(self) -> int:
        """Transfers whose end was not seen yet."""
        return len(self._memory.moving)

    def current(self) -> Any:
        """The stream that is current; raises ``LoaderError`` during graph capture, before anything that CUDA forbids
        then, as asking an event."""
        self._driver.check_not_capturing()
        return self._driver.current()

    def register(self, place: tuple[int, int], memory: NDArray[np.uint8]) -> None:
        """Let the device read a slot, if it could not before.

        That takes 0.4 s a GiB, which are best spent while the slot is being filled.
        """
        if place not in self._memory.registered:
            self._memory.register(place, memory)

    def prepare(self, stream: Any) -> Parcel:
        """A parcel for a batch of ``stream``, kept from now on until its transfer is over.

        Whoever has the slot's lease hang on the parcel's life can be interrupted anywhere.
        """
        return Parcel(stream, self._gear.pop() if self._gear else Gear(self._driver))

    def send(
        self,
        parcel: Parcel,
        filled: Filled,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        host: Mapping[str, NDArray[np.generic]],
        noisy: Sequence[NDArray[np.int64] | None],
        seed: int,
    ) -> None:
        """Start the copies of a batch.

        ``shapes`` of the spans in the batch; ``host``: small arrays; ``noisy[i]``: int64 [runs, 2] rows of span i that
        get noise, None for none; ``seed`` of the noise.
        """
        driver, gear = self._driver, parcel.gear
        self.register((filled.ring, filled.slot), filled.memory)
        parcel.place = filled.ring, filled.slot
        copies = [self._placed(move, parcel, filled, shapes) for move in self._moves]
        casts = [(plan, *self._cast(number, plan, parcel, filled)) for number, plan in self._recast]
        if host or self._small:
            copies.append(self._packed(parcel, filled, shapes, host))
        spans = parcel.spans

        def work() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            for plan, target, source in casts:
                # What is only staged here is allocated, used and freed on the side stream.
                staged = torch.empty_like(source, device=target.device).copy_(source, non_blocking=True)
                restored(staged, plan.dtype, spans[plan.scale] if plan.scale else None, out=target)
            if self._noise is not None:
                generator = driver.generator(seed)
                for plan, runs in zip(self._plans, noisy, strict=True):
                    if runs is not None:
                        rows = spans[plan.name].view(-1, *plan.field.shape)
                        add_noise(self._noise, rows, runs, generator)

        parcel.timed = not self._pace or self._sent % _TIMED == 0
        self._memory.moving.append(parcel)  # first: what an interrupted call has started is waited for, too
        driver.record(gear.ready, parcel.stream)
        driver.wait(driver.side, gear.ready)
        if parcel.timed:
            driver.record(gear.started, driver.side)
        driver.run(driver.side, work)
        driver.record(gear.done, driver.side)
        parcel.sent = True
        self._sent += 1

    def hand_out(self, parcel: Parcel, stream: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(spans, host arrays) of a parcel on the device, for ``stream``, the one that is current now."""
        driver = self._driver
        if not parcel.over:
            driver.wait(stream, parcel.gear.done)
        spans, host = parcel.spans, parcel.host
        if stream != parcel.stream:
            for tensor in (*spans.values(), *host.values()):
                driver.used_on(tensor, stream)
        parcel.spans, parcel.host = {}, {}  # the caller's alone: dropped early, the memory is free early
        parcel.taken = True
        if parcel.over:
            self._gear.append(parcel.gear)
        return spans, host

    def retire(self) -> None:
        """Let go of the parcels whose transfer is over, and with them of their slots."""
        memory, driver = self._memory, self._driver
        still: list[Parcel] = []
        over: list[Parcel] = []
        for parcel in memory.moving:
            memory.mark(parcel)
            (over if driver.completed(parcel.gear.done) else still).append(parcel)
        memory.moving[:] = still
        for parcel in over:
            parcel.over = True
            self._count(parcel)
            if parcel.taken:
                self._gear.append(parcel.gear)
        if memory.replaced:
            self._sources.clear()  # they would keep it mapped
            memory.forget_replaced()

    def close(self) -> None:
        """Wait for what is under way and unregister the ring.  Call it before the ring goes."""
        self._sources.clear()
        self._finalizer()

    def _count(self, parcel: Parcel) -> None:
        if parcel.timed and parcel.bytes:
            spent = self._driver.milliseconds(parcel.gear.started, parcel.gear.done)
            self._pace = spent * 1e6 / parcel.bytes
        self._moved(int(parcel.bytes * self._pace), parcel.bytes)

    def _placed(
        self, move: Move, parcel: Parcel, filled: Filled, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the states of a move their places on the device; (to, from) of their copy."""
        plans, itemsize = self._plans, move.dtype.itemsize
        start = filled.offsets[move.first]
        stop = filled.offsets[move.last] + filled.rows[move.last] * move.last_row_bytes
        block = self._driver.empty(((stop - start) // itemsize,), move.dtype)
        for number in range(move.first, move.last + 1):
            first = (filled.offsets[number] - start) // itemsize
            parcel.spans[plans[number].name] = strided(block, first, shapes[plans[number].name])
        parcel.bytes += stop - start
        return block, self._source(move, parcel.place, start, stop)

    def _source(self, move: Move, place: tuple[int, int], start: int, stop: int) -> torch.Tensor:
        """The bytes of a move in a slot; of packed batches they are the same whenever the slot comes round."""
        known = self._sources.get((place, move.first))
        if known is None or known[0] != (start, stop):
            whole = self._memory.registered[place][1]
            known = (start, stop), part_of(whole, start, move.dtype, ((stop - start) // move.dtype.itemsize,))
            self._sources[place, move.first] = known
        return known[1]

    def _cast(self, number: int, plan: SpanPlan, parcel: Parcel, filled: Filled) -> tuple[torch.Tensor, torch.Tensor]:
        """Give a span that changes its dtype its place on the device; (to, from)."""
        shape = filled.rows[number], *plan.field.shape
        source = part_of(self._memory.registered[parcel.place][1], filled.offsets[number], plan.stored, shape)
        parcel.spans[plan.name] = self._driver.empty(shape, plan.dtype)
        parcel.bytes += source.nbytes
        return parcel.spans[plan.name], source

    def _packed(
        self,
        parcel: Parcel,
        filled: Filled,
        shapes: Mapping[str, tuple[int, ...]],
        host: Mapping[str, NDArray[np.generic]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put what is small side by side in pinned memory, and give it its place on the device: one copy."""
        sources = [filled.span(number).reshape(shapes[plan.name]) for number, plan in self._small]
        sources += host.values()
        parts = [Part(plan.name, plan.dtype, shapes[plan.name]) for _, plan in self._small]
        parts += [Part(name, torch_dtype_of(array.dtype), array.shape) for name, array in host.items()]
        if self._packing.parts != tuple(parts):
            self._packing = Packing(parts)
        packing = self._packing
        staged = parcel.gear.pack(packing, sources, self._driver)
        block = self._driver.empty(packing.shape, packing.dtype)
        for name, tensor in packing.on_device(block).items():
            (parcel.host if name in host else parcel.spans)[name] = tensor
        parcel.bytes += packing.bytes
        return block, staged
