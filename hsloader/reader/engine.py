"""The engine: takes requests from the ring, has its threads fill them, reports them done.

It is the same in a feeder process, in one of its helpers and inside the trainer's process. ``look`` never waits for a
disk, so that who calls it notices a vanished trainer within milliseconds whatever the reads do.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsloader.reader.access import Access, Bypass
from hsloader.reader.batch import Batch, encode_bad
from hsloader.reader.counters import OWN_COUNTERS, FeederCounter, TrainerCounter
from hsloader.reader.ring import Ring, Status
from hsloader.reader.steps import Plan
from hsloader.reader.workers import Shared, Worker
from hsloader.store.manifest import read_manifest
from hsloader.store.stored_segment import Segment

__all__ = ["MOST_ENGINES", "Engine", "EngineSettings"]

_PARTS = int(FeederCounter.PARTS)
MOST_ENGINES = 4

_BUFFERS = 20  # at most, of one run each: 80 MiB
_TOKEN_BYTES = 64 << 20  # decoded token chunks that are kept: some ten million tokens of ids


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What the engine reads and how; travels to the feeder as JSON.

    ``segments`` and ``fingerprint`` say which dataset the trainer planned on: its first so many segments.
    """

    path: str
    segments: int
    fingerprint: str
    fields: tuple[str, ...]
    row_bytes: tuple[int, ...]
    mode: str
    drop_pages: bool
    bypass: Bypass
    readers: int
    decoders: int
    engines: int = 1  # processes that share the requests and the threads
    idle_after: float = 60.0
    metrics_port: int = 0  # where Prometheus finds the counters; 0: nowhere

    @classmethod
    def of(cls, args: dict[str, Any]) -> EngineSettings:
        """The settings from their JSON form."""
        lists = {name: tuple(args[name]) for name in ("fields", "row_bytes")}
        return cls(**{**args, **lists})

    def threads_of(self, part: int) -> tuple[int, int]:
        """The (reading, decoding) threads of one of the engines."""
        of = self.engines
        return self.readers // of + (part < self.readers % of), self.decoders // of + (part < self.decoders % of)

    def part_of(self, serial: int) -> int:
        """Which of the engines fills the request of that serial: each gets as many as it has decoding threads.

        In plain turns those with one thread less would hold up all others: 15 threads in four processes did the work of
        12.
        """
        return serial % self.decoders % self.engines


class Engine:
    """Fills requests of a ring: all of them, or those of its ``part`` where several processes share the work.

    ``bell`` is the socket that gets a byte when a batch is done.
    """

    def __init__(self, ring: Ring, settings: EngineSettings, bell: socket.socket, part: int = 0) -> None:
        self.ring = ring
        self.settings = settings
        self.part = part
        self._bell = bell
        self._seen = [0] * ring.shape.slots
        self._active: dict[int, Batch] = {}
        self._refusal = ""
        self._lock = threading.Lock()  # completions and the counters
        self._workers: list[Worker] = []
        self._counts = ring.feeder[_PARTS + part * OWN_COUNTERS : _PARTS + (part + 1) * OWN_COUNTERS]
        self._shared = self._prepare()

    def _prepare(self) -> Shared:
        settings = self.settings
        segments: Sequence[Segment] = ()
        try:
            segments = _open(settings)
        except Exception as error:
            self._refusal = f"the feeder cannot read the dataset: {type(error).__name__}: {error}"
        readers, decoders = settings.threads_of(self.part)
        return Shared(
            self.ring,
            segments,
            settings.fields,
            Access(settings.mode, settings.drop_pages, settings.bypass),
            readers=readers,
            decoders=decoders,
            buffers=_BUFFERS // settings.engines,
            token_bytes=_TOKEN_BYTES // settings.engines,
            report=self._report,
        )

    def start(self) -> None:
        """Start the threads."""
        shared = self._shared
        readers, decoders = self.settings.threads_of(self.part)
        first = sum(sum(self.settings.threads_of(part)) for part in range(self.part))
        for number in range(readers + decoders):
            reads = number < readers
            queue = shared.reads if reads else shared.decodes
            name = f"hsl-read-{number}" if reads else f"hsl-decode-{number - readers}"
            worker = Worker(shared, queue, first + number, name, 1 if reads else 2)
            worker.start()
            self._workers.append(worker)
        if self.part == 0:
            counters = self.ring.feeder
            counters[FeederCounter.PID] = os.getpid()
            counters[FeederCounter.READERS] = self.settings.readers
            counters[FeederCounter.DECODERS] = self.settings.decoders
            counters[FeederCounter.READY_AT] = time.monotonic_ns()

    def stop(self, timeout: float = 5.0) -> None:
        """Drop what is under way and end the threads; one that hangs in a read is left behind after ``timeout``."""
        for batch in list(self._active.values()):
            batch.cancelled = True
        self._shared.reads.close()
        self._shared.decodes.close()
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        self._shared.shards.clear()

    def look(self) -> None:
        """Look at all requests: begin new ones in the order they were made, drop those of an older generation."""
        generation = int(self.ring.trainer[TrainerCounter.GENERATION])
        for batch in list(self._active.values()):
            if batch.request.generation < generation:
                batch.cancelled = True
        found = []
        for slot, seen in enumerate(self._seen):
            request = self.ring.request(slot)
            if request is not None and request.serial != seen and self.settings.part_of(request.serial) == self.part:
                found.append((request.serial, slot, request))
        for _, slot, request in sorted(found, key=lambda entry: entry[0]):
            completion = self.ring.completion(slot)
            if completion is not None and completion.serial == request.serial:
                self._seen[slot] = request.serial  # done by a feeder before this one
                continue
            blob = self.ring.request_blob(request)
            if blob is None:
                continue  # being written; a byte on the channel follows
            self._seen[slot] = request.serial
            self._begin(Batch(slot, request, self.ring.slot(slot), self.settings.row_bytes), blob, generation)
        with self._lock:
            self._counts[_place(FeederCounter.PREFAULTED)] = len(self._shared.faulted) * self.ring.shape.slot_bytes
            self._counts[_place(FeederCounter.QUEUED_READS)] = len(self._shared.reads)
            self._counts[_place(FeederCounter.QUEUED_DECODES)] = len(self._shared.decodes)
            self._counts[_place(FeederCounter.OPEN_SHARDS)] = len(self._shared.shards)
            now = time.monotonic_ns()
            self.ring.feeder[FeederCounter.LOOKS + self.part] = self.ring.feeder[FeederCounter.SEEN_AT] = now

    def _begin(self, batch: Batch, blob: bytes, generation: int) -> None:
        self._active[batch.request.serial] = batch
        with self._lock:
            self._counts[_place(FeederCounter.TAKEN)] += 1
        batch.cancelled = batch.request.generation < generation
        batch.skipped = batch.cancelled
        if self._refusal:
            batch.fail(self._refusal)
        else:
            try:
                batch.parse(blob)
            except Exception:
                batch.fail(traceback.format_exc(limit=-2))
        if batch.failure or batch.cancelled:
            batch.done()
            self._report(batch)
        else:
            self._shared.reads.put(Plan(batch))

    def _report(self, batch: Batch) -> None:
        """Write a batch's completion and ring the bell; called by whichever thread did its last piece of work."""
        status, blob = Status.FILLED, b""
        try:
            if batch.failure:
                status, blob = Status.FAILED, batch.failure[-4096:].encode(errors="replace")
            elif batch.skipped:
                status = Status.CANCELLED
            elif batch.bad:
                blob = encode_bad(batch.bad, batch.request.area_bytes)
            self._complete(batch, status, blob)
        except Exception as error:  # a batch that is never reported would be waited for without end
            self._complete(batch, Status.FAILED, f"{type(error).__name__}: {error}".encode())
        with contextlib.suppress(OSError):  # a full one holds a byte already; a closed one ends the process
            self._bell.send(b"\0")

    def _complete(self, batch: Batch, status: int, blob: bytes) -> None:
        finished = time.monotonic_ns()
        counts = self._counts
        with self._lock:
            self._active.pop(batch.request.serial, None)
            if status == Status.FILLED:
                counts[_place(FeederCounter.FILLED)] += 1
                counts[_place(FeederCounter.FILL_NS)] += finished - batch.started
            elif status == Status.CANCELLED:
                counts[_place(FeederCounter.CANCELLED)] += 1
            self.ring.write_completion(
                batch.slot,
                batch.request,
                status,
                bad=len(batch.bad),
                blob=blob,
                times=(batch.started, finished),
                decoded=batch.decoded_bytes,
            )


def _place(counter: FeederCounter) -> int:
    """Where a counter lies among an engine's own."""
    return int(counter) - int(FeederCounter.TAKEN)


def _open(settings: EngineSettings) -> list[Segment]:
    root = Path(settings.path)
    manifest = read_manifest(root).first(settings.segments)
    if manifest.fingerprint != settings.fingerprint:
        raise ValueError(
            f"{root}: expected {settings.segments} segments with fingerprint {settings.fingerprint}, found "
            f"{manifest.fingerprint}: the dataset was replaced by another while the loader was open"
        )
    return [Segment(root, entry, manifest.fields) for entry in manifest.segments]
