"""The engine: takes requests from the ring, has its threads fill them, reports them done.

It is the same in a feeder process and inside the trainer's process: ``serve`` waits for a byte on the channel (or the
trainer's end) and then looks at the requests in the ring. It never waits for a disk itself, so that a trainer that
vanished is noticed within milliseconds whatever the reads do.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsloader.monitor.header import take_snapshot
from hsloader.reader.access import Access
from hsloader.reader.batch import Batch, encode_bad
from hsloader.reader.counters import FeederCounter, TrainerCounter
from hsloader.reader.ring import Ring, Status
from hsloader.reader.steps import Plan
from hsloader.reader.workers import Shared, Worker
from hsloader.store.manifest import read_manifest
from hsloader.store.stored_segment import Segment

__all__ = ["Engine", "EngineSettings"]


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
    readers: int
    decoders: int
    idle_after: float = 60.0
    metrics_port: int = 0  # where Prometheus finds the counters; 0: nowhere

    @classmethod
    def of(cls, args: dict[str, Any]) -> EngineSettings:
        """The settings from their JSON form."""
        lists = {name: tuple(args[name]) for name in ("fields", "row_bytes")}
        return cls(**{**args, **lists})


class Engine:
    """Fills the ring's requests with ``settings``; one a ring."""

    def __init__(self, ring: Ring, channel: socket.socket, settings: EngineSettings) -> None:
        self.ring = ring
        self.channel = channel
        self.settings = settings
        self._seen = [0] * ring.shape.slots
        self._active: dict[int, Batch] = {}
        self._refusal = ""
        self._lock = threading.Lock()  # completions and the feeder's counters
        self._workers: list[Worker] = []
        self._shared = self._prepare()
        channel.setblocking(False)

    def _prepare(self) -> Shared:
        settings = self.settings
        segments: Sequence[Segment] = ()
        try:
            segments = _open(settings)
        except Exception as error:
            self._refusal = f"the feeder cannot read the dataset: {type(error).__name__}: {error}"
        access = Access(settings.mode, settings.drop_pages)
        threads = {"readers": settings.readers, "decoders": settings.decoders}
        return Shared(self.ring, segments, settings.fields, access, report=self._report, **threads)

    def start(self) -> None:
        """Start the threads."""
        shared, readers = self._shared, self.settings.readers
        for row in range(readers + self.settings.decoders):
            reads = row < readers
            queue = shared.reads if reads else shared.decodes
            name = f"hsl-read-{row}" if reads else f"hsl-decode-{row - readers}"
            worker = Worker(shared, queue, row, name, 1 if reads else 2)
            worker.start()
            self._workers.append(worker)
        counters = self.ring.feeder
        counters[FeederCounter.PID] = os.getpid()
        counters[FeederCounter.READERS] = readers
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

    def serve(self, parent_fd: int | None, parent_gone: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Take requests until the channel hangs up or the trainer ends. ``say`` gets a line when nothing is asked."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        if parent_fd is not None:
            poller.register(parent_fd, select.POLLIN)
        idle = _Idle(self.settings.idle_after, say)
        with self._metrics(say):
            self._serve(poller, parent_gone, idle)

    def _serve(self, poller: select.poll, parent_gone: Callable[[], bool], idle: _Idle) -> None:
        self.look()
        while True:
            # Without a pidfd the parent is looked for every second, and so are the requests' age and cancelled work.
            poller.poll(1000)
            if parent_gone() or not self._listen():
                return
            self.look()
            idle.look(self.ring)

    @contextlib.contextmanager
    def _metrics(self, say: Callable[[str], None]) -> Iterator[None]:
        """Serve the counters to Prometheus meanwhile, if asked; a port that cannot be had is no reason to stop."""
        if not self.settings.metrics_port:
            yield
            return
        from hsloader.monitor.prometheus import MetricsServer

        try:
            server = MetricsServer(self.settings.metrics_port, lambda: take_snapshot(self.ring.fd, self.ring.shape))
        except OSError as error:
            say(f"hsloader: no metrics on port {self.settings.metrics_port}: {error.strerror or error}\n")
            yield
            return
        try:
            yield
        finally:
            server.close()

    def _listen(self) -> bool:
        """Empty the channel; False once it hung up."""
        try:
            while True:
                if not self.channel.recv(4096):
                    return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    def look(self) -> None:
        """Look at all requests: begin new ones in the order they were made, drop those of an older generation."""
        generation = int(self.ring.trainer[TrainerCounter.GENERATION])
        self.ring.feeder[FeederCounter.SEEN_AT] = time.monotonic_ns()
        for batch in list(self._active.values()):
            if batch.request.generation < generation:
                batch.cancelled = True
        found = []
        for slot, seen in enumerate(self._seen):
            request = self.ring.request(slot)
            if request is not None and request.serial != seen:
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
        self.ring.feeder[FeederCounter.QUEUED_READS] = len(self._shared.reads)
        self.ring.feeder[FeederCounter.QUEUED_DECODES] = len(self._shared.decodes)
        self.ring.feeder[FeederCounter.OPEN_SHARDS] = len(self._shared.shards)

    def _begin(self, batch: Batch, blob: bytes, generation: int) -> None:
        self._active[batch.request.serial] = batch
        self.ring.feeder[FeederCounter.TAKEN] += 1
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
        with contextlib.suppress(OSError):  # a full channel holds a byte already; a closed one ends serve()
            self.channel.send(b"\0")

    def _complete(self, batch: Batch, status: int, blob: bytes) -> None:
        finished = time.monotonic_ns()
        counters = self.ring.feeder
        with self._lock:
            self._active.pop(batch.request.serial, None)
            if status == Status.FILLED:
                counters[FeederCounter.FILLED] += 1
                counters[FeederCounter.FILL_NS] += finished - batch.started
            elif status == Status.CANCELLED:
                counters[FeederCounter.CANCELLED] += 1
            self.ring.write_completion(
                batch.slot,
                batch.request,
                status,
                bad=len(batch.bad),
                blob=blob,
                times=(batch.started, finished),
                decoded=batch.decoded_bytes,
            )


class _Idle:
    """Says once, and then ever more seldom, that batches are ready and nobody has asked for one."""

    def __init__(self, after: float, say: Callable[[str], None]) -> None:
        self._after = after
        self._say = say
        self._call = 0
        self._next = after

    def look(self, ring: Ring) -> None:
        call = int(ring.trainer[TrainerCounter.LAST_CALL])
        if call != self._call:
            self._call, self._next = call, self._after
            return
        quiet = (time.monotonic_ns() - call) / 1e9
        if not call or quiet < self._next or ring.trainer[TrainerCounter.WAITING_SINCE]:
            return
        ready = take_snapshot(ring.fd, ring.shape).ready
        self._next *= 5
        if ready > 0:
            self._say(f"hsloader: the trainer has not asked for a batch for {quiet:.0f} s; {ready} are ready\n")


def _open(settings: EngineSettings) -> list[Segment]:
    root = Path(settings.path)
    manifest = read_manifest(root).first(settings.segments)
    if manifest.fingerprint != settings.fingerprint:
        raise ValueError(
            f"{root}: expected {settings.segments} segments with fingerprint {settings.fingerprint}, found "
            f"{manifest.fingerprint}: the dataset was replaced by another while the loader was open"
        )
    return [Segment(root, entry, manifest.fields) for entry in manifest.segments]
