"""FeederClient: the trainer's side of the reader. Asks for batches, waits for them, keeps the feeder alive.

What was asked and what is done are facts of the ring's header, never of a local variable: every call can be
interrupted anywhere (ctrl-C) and made again. One thread at a time; nothing here takes a lock.
"""

from __future__ import annotations

import logging
import os
import platform
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hsloader.errors import FeederError, LoaderError
from hsloader.monitor.header import take_snapshot
from hsloader.monitor.stats import flat_stats
from hsloader.monitor.voice import say
from hsloader.monitor.words import plural
from hsloader.reader.batch import BAD_BYTES, decode_bad, pack_blob
from hsloader.reader.choices import check_budget, choose_settings, possible_options
from hsloader.reader.counters import FeederCounter, ThreadCounter, TrainerCounter
from hsloader.reader.holds import Holds
from hsloader.reader.hosts import Host, ProcessHost, ThreadHost, wait_readable
from hsloader.reader.lease import Filled, Prepared, Slot, State, watch_forks
from hsloader.reader.options import ReadOptions
from hsloader.reader.pieces import WIRE, BatchRequest, SampleTable, span_offsets, to_wire
from hsloader.reader.prefault import prefault_while_starting
from hsloader.reader.report import file_in_hand
from hsloader.reader.ring import Ring, RingShape, Status

if TYPE_CHECKING:
    from hsloader.store.dataset import Dataset

__all__ = ["FeederClient"]


_MOST_SLOTS = 512
# Whether what the feeder wrote before a record is seen by whoever sees the record, without a system call between.
_LOADS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
_TICK = 1.0  # seconds between looks at a feeder that neither answers nor ends


class FeederClient:
    """Reads batches of ``fields`` of ``dataset`` into a ring of ``budget`` bytes, through a feeder process.

    ``slot_bytes``: the largest batch there can be (``span_offsets`` computes it); ``pieces``: about the most pieces
    of a batch (more are possible, at the price of new memory); ``info``: JSON about the loader for monitors;
    ``metrics_port``: where the feeder serves the counters to Prometheus, 0 for nowhere.
    ``ValueError`` if the budget is under three of the largest batches or over the memory that is available.
    """

    def __init__(
        self,
        dataset: Dataset,
        fields: Sequence[str],
        *,
        slot_bytes: int,
        budget: int,
        pieces: int = 1024,
        options: ReadOptions | None = None,
        info: Mapping[str, Any] | None = None,
        metrics_port: int = 0,
    ) -> None:
        self.options = possible_options(options or ReadOptions())
        self.fields = tuple(fields)
        self.dataset_path = dataset.path.absolute()
        missing = [name for name in self.fields if name not in dataset.fields]
        if missing or not self.fields:
            raise ValueError(f"{dataset.path} has no field {missing}; it has {', '.join(dataset.fields)}")
        described = [dataset.fields[name] for name in self.fields]
        self._row_bytes = tuple(field.row_bytes for field in described)
        self._kinds = [(field.type.bits, field.row_bytes, field.shape) for field in described]
        self._table = SampleTable(dataset.segment_of, dataset.first_rows, dataset.lengths)
        size = RingShape.round_slot(slot_bytes)
        check_budget(size, budget)
        slots = min(_MOST_SLOTS, budget // size)
        self._settings, self.mode_reason = choose_settings(
            dataset, self.fields, self.options, slots=slots, metrics_port=metrics_port
        )
        area = len(self.fields) * 16 + pieces * WIRE.itemsize + BAD_BYTES
        self._shape = RingShape(
            slots=slots,
            slot_bytes=size,
            area_bytes=-(-area // 64) * 64,
            threads=self._settings.readers + self._settings.decoders,
        )
        self._info = dict(info or {})
        self._keys: dict[int, Slot] = {}
        self._holds = Holds()
        self._serial = 0
        self._turn = 0  # the slot that probably comes free next
        self._rings = 0
        self._slots: list[Slot] = []
        self._state = State(Ring.create(self._shape))
        self._new_slots()
        self._finalizer = weakref.finalize(self, State.shut, self._state)
        watch_forks(self._state)
        self._say_what_it_is()

    # What a loader reads off it.

    @property
    def slots(self) -> int:
        """Batches that the ring holds."""
        return len(self._slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: the largest batch, rounded up to whole pages."""
        return self._shape.slot_bytes

    @property
    def free(self) -> int:
        """Slots that a ``submit`` would find free now."""
        self.check()
        self._listen()
        self._holds.collect()
        return sum(self._is_free(slot) for slot in self._slots)

    @property
    def room(self) -> int:
        """How many slots may be free: 0 for certain, else ``submit`` is worth preparing a request for."""
        self._holds.collect()
        return max(0, len(self._slots) - self._busy())

    @property
    def held(self) -> int:
        """Slots that are kept by ``hold``."""
        self._holds.collect()
        return len(set(map(id, self._holds.slots)))

    @property
    def mode(self) -> str:
        """How the files are read: ``"mmap"``, ``"pread"`` or ``"direct"``; ``mode_reason`` says why."""
        return self._settings.mode

    @property
    def pid(self) -> int | None:
        """The feeder's process id (this process's own when it reads in threads); None while none runs."""
        host = self._state.host
        return host.pid if host is not None else None

    @property
    def restarts(self) -> int:
        """How often a dead feeder was started again."""
        return int(self.counters[TrainerCounter.RESTARTS])

    @property
    def ring(self) -> Ring:
        """The ring, for those who read its counters."""
        return self._state.ring

    @property
    def counters(self) -> Any:
        """The trainer's counters (int64, indexed by ``TrainerCounter``); the loader writes those from SAMPLES on."""
        return self._state.ring.trainer

    def tell(self, **info: Any) -> None:
        """Say more about the loader to monitors, beside the ``info`` that it was made with."""
        self.check()
        self._info |= info
        self._say_what_it_is()

    def stats(self) -> dict[str, float]:
        """The ring's counters since the client was made; the names are those of ``hsloader.monitor.stats``."""
        self.check()
        return flat_stats(take_snapshot(self._state.ring.fd, self._state.ring.shape))

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    # The batches.

    def check(self) -> None:
        """Raise ``LoaderError`` in a process that was forked from the client's, and once it is closed."""
        if self._state.owner != os.getpid():
            raise LoaderError(
                f"this loader belongs to process {self._state.owner}; this one ({os.getpid()}) was forked from it and "
                "has no feeder. Make the loader in the process that uses it (a torch DataLoader around it needs "
                "num_workers=0; hsloader reads ahead by itself)"
            )
        if self._state.closed:
            raise LoaderError("the loader is closed; make a new one")

    def start(self) -> None:
        """Start the feeder if none runs; does not wait for it."""
        self.check()
        if self._state.host is None:
            self._state.host = self._launch()
            if not self.options.in_process and not self.restarts:
                prefault_while_starting(self._state.ring)  # last: whatever ends it, the feeder is known to be there

    def prepare(self, requests: Sequence[BatchRequest]) -> list[Prepared]:
        """Requests as ``submit`` also takes them: several take little longer than one; at most ``MOST_REQUESTS``.

        Raises ``ValueError`` for one that cannot be read or does not fit a slot.
        """
        prepared = []
        for request, wire in zip(requests, to_wire(requests, self._table), strict=True):
            offsets, size = span_offsets(request.rows, self._row_bytes)
            if size > self._shape.slot_bytes:
                raise ValueError(f"a batch of {size:,} bytes; the ring was made for {self._shape.slot_bytes:,} at most")
            prepared.append(Prepared(offsets, request.rows, pack_blob(offsets, request.rows, wire)))
        return prepared

    def submit(self, key: int, request: BatchRequest | Prepared, *, wake: bool = True) -> bool:
        """Ask for a batch under ``key``, any int. False if no slot is free; True, and nothing else, if it is asked.

        ``wake=False``: the feeder is not told; of several requests only the last need be, or ``wake()`` does it.
        Raises ``ValueError`` for a request that cannot be read or does not fit a slot.
        """
        self.check()
        if key in self._keys:
            return True
        self.start()
        slot = self._free_slot() if self.room else None
        if slot is None:
            return False
        if isinstance(request, BatchRequest):
            (request,) = self.prepare([request])
        slot.ask(key, *request)
        self._ask(slot)
        self._keys[key] = slot
        if wake:
            self._ring_bell()
        counters = self.counters
        counters[TrainerCounter.REQUESTED] += 1
        counters[TrainerCounter.LAST_CALL] = time.monotonic_ns()
        counters[TrainerCounter.SLOTS_BUSY] = self._busy()
        return True

    def wake(self) -> None:
        """Have the feeder look at what was asked; ``wait`` does so, too."""
        self.check()
        self._ring_bell()

    def look(self, key: int) -> Filled | None:
        """``wait(key)`` if the batch is there, else None at once."""
        self.check()
        counters = self.counters
        counters[TrainerCounter.LAST_CALL] = time.monotonic_ns()
        filled = self._result(key) if _LOADS_IN_ORDER else None
        if filled is None:
            self._listen()
            filled = self._result(key)
        if filled is not None:
            counters[TrainerCounter.LAST_WAIT_NS] = 0
        return filled

    def wait(self, key: int, timeout: float | None = None) -> Filled | None:
        """The batch asked under ``key``, once it is there; None after ``timeout`` seconds.

        Until ``done(key)`` the same call gives the same batch again. ``KeyError``: nothing was asked under ``key``.
        Raises ``FeederError`` if the feeder died more than ``ReadOptions.restarts`` times over this batch.
        """
        self.check()
        begun = time.monotonic_ns()
        deadline = None if timeout is None else time.monotonic() + timeout
        counters = self.counters
        counters[TrainerCounter.LAST_CALL] = begun
        try:
            while True:
                self._listen()
                filled = self._result(key)
                if filled is not None:
                    counters[TrainerCounter.LAST_WAIT_NS] = time.monotonic_ns() - begun
                    return filled
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                counters[TrainerCounter.WAITING_SERIAL] = self._keys[key].serial
                counters[TrainerCounter.WAITING_SINCE] = begun
                self._watch(left)
        finally:
            counters[TrainerCounter.WAITING_SINCE] = 0
            counters[TrainerCounter.WAIT_NS] += time.monotonic_ns() - begun

    def wait_free(self, timeout: float | None = None) -> bool:
        """Wait until a slot is free; False after ``timeout`` seconds.

        Only batches that were asked and forgotten come free by waiting; those that somebody holds do not.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        begun = time.monotonic_ns()
        try:
            while not self.free:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self.start()
                # Another thread may release a hold, which rings no bell.
                self._watch(0.05 if left is None else min(left, 0.05))
            return True
        finally:
            self.counters[TrainerCounter.WAIT_NS] += time.monotonic_ns() - begun

    def place(self, key: int) -> tuple[tuple[int, int], npt.NDArray[np.uint8]]:
        """Where the batch asked under ``key`` lies or will lie: (ring, slot), and the memory of that slot."""
        slot = self._keys[key]
        return (slot.ring_number, slot.number), slot.ring.slot(slot.number)

    def done(self, key: int) -> None:
        """The batch is needed no more; its slot is free once no hold is left. Unknown keys are ignored."""
        if self._keys.pop(key, None) is not None:
            self.counters[TrainerCounter.SLOTS_BUSY] = self._busy()

    def hold(self, key: int, owner: object | None = None) -> int:
        """Keep the batch's memory until ``release`` of the number returned, or until ``owner`` is collected."""
        self.check()
        return self._holds.hold(self._keys[key], owner)

    def release(self, number: int) -> None:
        """End a hold. Safe in finalizers, in any thread, twice."""
        self._holds.release(number)

    def abandon(self) -> None:
        """Forget every batch that was asked: a new iteration begins. What is not read yet will not be."""
        self.check()
        self.counters[TrainerCounter.GENERATION] += 1
        self.counters[TrainerCounter.CANCELLED] += len(self._keys)
        self._keys.clear()
        self.counters[TrainerCounter.SLOTS_BUSY] = self._busy()
        self._ring_bell()

    def close(self) -> None:
        """End the feeder and give up the ring; memory that views still use stays until they are gone."""
        self._finalizer()
        self._keys.clear()
        self._holds.clear()
        self._slots = []

    def __enter__(self) -> FeederClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside.

    def _say_what_it_is(self) -> None:
        settings = self._settings
        told = {"dataset": settings.path, "fields": self.fields, "mode": settings.mode, "reason": self.mode_reason}
        self._state.ring.write_info({**self._info, **told, "owner": os.getpid()})
        self.counters[TrainerCounter.STARTED_AT] = int(self.counters[TrainerCounter.STARTED_AT]) or time.monotonic_ns()
        self.counters[TrainerCounter.GENERATION] = max(1, int(self.counters[TrainerCounter.GENERATION]))

    def _new_slots(self) -> None:
        ring = self._state.ring
        self._rings += 1
        self._slots = [Slot(ring, self._rings, number) for number in range(self._shape.slots)]

    def _launch(self) -> Host:
        if self.options.in_process:
            return ThreadHost(self._state.ring, self._settings)
        host = ProcessHost(self._state.ring, self._settings)
        self.counters[TrainerCounter.FEEDER_PID] = host.pid
        return host

    def _listen(self) -> None:
        """Empty the channel. Records are read after it: the system call orders them (see ``ring``)."""
        host = self._state.host
        if host is not None:
            try:
                while len(host.channel.recv(4096)) == 4096:  # less: there was no more
                    pass
            except OSError:
                pass

    def _ring_bell(self) -> None:
        host = self._state.host
        if host is not None:
            try:
                host.channel.send(b"\0")
            except BlockingIOError:
                pass  # full: the feeder has a byte to wake up by
            except OSError:
                self._recover_if_dead()

    def _free_slot(self) -> Slot | None:
        """A slot that is free, looked for where one came free last: mostly in turn."""
        self._listen()
        count = len(self._slots)
        for step in range(count):
            slot: Slot = self._slots[(self._turn + step) % count]
            if self._is_free(slot):
                self._turn = (self._turn + step + 1) % count
                return slot
        return None

    def _is_free(self, slot: Slot) -> bool:
        return not slot.holds and self._keys.get(slot.key) is not slot and slot.acknowledged()

    def _busy(self) -> int:
        """Slots that are asked for, filled or held."""
        held = {id(slot) for slot in self._holds.slots if self._keys.get(slot.key) is not slot}
        return len(self._keys) + len(held)

    def _ask(self, slot: Slot, generation: int | None = None) -> None:
        """Write the slot's request into the ring, under a new serial."""
        self._serial += 1
        slot.write(self._serial, int(self.counters[TrainerCounter.GENERATION]) if generation is None else generation)

    def _result(self, key: int) -> Filled | None:
        slot = self._keys[key]
        completion = slot.completion()
        if completion is None:
            return None
        if completion.status == Status.CANCELLED:  # an abandon() that was interrupted before it forgot the key
            self._ask(slot)
            self._ring_bell()
            return None
        if completion.status == Status.FAILED:
            raise FeederError(f"a batch could not be read: {slot.answer(completion).decode(errors='replace')}")
        bad = decode_bad(slot.answer(completion), self.fields) if completion.bad else ()
        if not slot.received:
            slot.received = True
            counters = self.counters
            counters[TrainerCounter.RECEIVED] += 1
            counters[TrainerCounter.LAST_SERIAL] = completion.serial
            if bad:
                counters[TrainerCounter.BAD_SAMPLES] += len({entry.sample for entry in bad})
        return slot.filled(self._kinds, bad, completion)

    def _watch(self, timeout: float | None) -> None:
        """Wait for the feeder to say something, to end, or for a tick; bring a dead one back."""
        self.start()
        host = self._state.host
        assert host is not None
        self._ring_bell()  # a submit() may have been interrupted before it rang
        fds = [fd for fd in (host.channel.fileno(), host.death_fd) if fd is not None and fd >= 0]
        wait_readable(fds, _TICK if timeout is None else min(timeout, _TICK))
        self._recover_if_dead()

    def _recover_if_dead(self) -> None:
        host = self._state.host
        if host is None:
            return
        stuck = host.stuck()
        if host.alive() and not stuck:
            return
        stuck = stuck or host.remains()
        words = host.epitaph() + file_in_hand(self._state.ring)
        host.close()
        self.counters[TrainerCounter.FEEDER_PID] = 0
        asked = [slot for slot in self._slots if not slot.acknowledged()]
        forgotten = [slot for slot in asked if self._keys.get(slot.key) is not slot]
        asked = [slot for slot in asked if slot not in forgotten]
        ring = self._state.ring
        left = [slot for slot in self._keys.values() if slot.ring is not ring and not slot.acknowledged()]
        stuck = stuck or bool(left)  # ctrl-C came while the ring was replaced: what is left in the old one moves, too
        asked += left
        for slot in asked:
            slot.attempts += 1
        if any(slot.attempts > self.options.restarts for slot in asked):
            raise FeederError(f"the feeder died {self.options.restarts + 1} times over the same batch; now {words}")
        if stuck:
            words += "; a thread of it hangs in the kernel, so the ring is replaced"
            asked = self._replace_ring(asked)
        else:
            for slot in forgotten:
                self._ask(slot, generation=0)  # the next feeder hands it back unread
        for slot in asked:
            self._ask(slot)
        again = plural(len(asked), "batch", "batches")
        say(f"{words}; it is started again and asked for {again} again", logging.WARNING)
        self.counters[TrainerCounter.RESTARTS] += 1
        self._state.host = None
        self.start()

    def _replace_ring(self, asked: Sequence[Slot]) -> list[Slot]:
        """Move what is ``asked`` to a new ring; what is filled stays in the old one, which its views keep alive.

        Threads of the dead feeder may still write into the old ring.
        """
        old, ring = self._state.ring, Ring.create(self._shape)
        ring.trainer[:] = old.trainer
        ring.feeder[FeederCounter.PARTS :] = old.feeder[FeederCounter.PARTS :]
        ring.threads[:, ThreadCounter.READS :] = old.threads[:, ThreadCounter.READS :]
        self._state.ring = ring
        self._new_slots()
        self._say_what_it_is()
        moved = []
        for slot, new in zip(asked, self._slots, strict=False):
            new.take_over(slot)
            self._ask(new)  # before it takes the key: a slot that has it is asked, wherever ctrl-C comes
            self._keys[slot.key] = new
            moved.append(new)
        return moved
