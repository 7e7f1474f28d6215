"""The feeder's threads, the queues between them, and what they share. The work itself is in ``steps``."""

from __future__ import annotations

import contextlib
import heapq
import os
import queue
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hsloader.errors import DatasetError
from hsloader.reader.access import Access, Buffers, OpenShards
from hsloader.reader.batch import Batch
from hsloader.reader.counters import Stage, ThreadCounter
from hsloader.reader.ring import Ring
from hsloader.store.stored_segment import ArrayInfo, Segment

__all__ = ["DecodeQueue", "ReadQueue", "Shared", "TokenChunks", "Work", "Worker"]

Bytes = npt.NDArray[np.uint8]


class Work(Protocol):
    """A piece of work of ``batch``; ``run`` never raises what a batch can survive."""

    @property
    def batch(self) -> Batch:
        """The batch it belongs to."""

    def run(self, worker: Worker) -> None:
        """Do it, and count it done."""


class ReadQueue:
    """Work for the reading threads; that of the earliest batch goes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Work]] = []
        self._count = 0
        self._ready = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, *works: Work) -> None:
        """Add work."""
        with self._ready:
            for work in works:
                self._count += 1
                heapq.heappush(self._heap, (work.batch.request.serial, self._count, work))
            self._ready.notify(len(works))

    def get(self) -> Work | None:
        """The next piece of work; waits for one. None once the queue is closed."""
        with self._ready:
            while not self._heap and not self._closed:
                self._ready.wait()
            return None if self._closed else heapq.heappop(self._heap)[2]

    def close(self) -> None:
        """Send the threads home."""
        with self._ready:
            self._closed = True
            self._heap.clear()
            self._ready.notify_all()


class DecodeQueue:
    """Work for the decoding threads, first come first served (reads were issued in the order of the batches)."""

    def __init__(self, threads: int) -> None:
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._last: deque[Work] = deque()
        self._threads = threads

    def __len__(self) -> int:
        return self._works.qsize()

    def put(self, *works: Work) -> None:
        """Add work."""
        for work in works:
            self._works.put(work)

    def put_last(self, *works: Work) -> None:
        """Add work for when there is no other; the thread that next runs out of it finds it."""
        self._last.extend(works)

    def get(self) -> Work | None:
        """The next piece of work; waits for one. None once the queue is closed."""
        if self._last:
            with contextlib.suppress(queue.Empty):
                return self._works.get_nowait()
            with contextlib.suppress(IndexError):
                return self._last.popleft()
        return self._works.get()

    def close(self) -> None:
        """Send the threads home, after what is queued."""
        self._last.clear()
        for _ in range(self._threads):
            self._works.put(None)


class TokenChunks:
    """Decoded chunks of token fields, the least recently used one goes first."""

    def __init__(self, capacity: int) -> None:
        self._room = capacity
        self._chunks: OrderedDict[tuple[int, int, int], Bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int, int]) -> Bytes | None:
        """The chunk if it is here; ``key`` is (segment, field, chunk)."""
        with self._lock:
            found = self._chunks.get(key)
            if found is not None:
                self._chunks.move_to_end(key)
            return found

    def put(self, key: tuple[int, int, int], chunk: Bytes) -> None:
        """Keep a chunk."""
        with self._lock:
            if key not in self._chunks:
                self._chunks[key] = chunk
                self._room -= len(chunk)
            while self._room < 0 and len(self._chunks) > 1:
                self._room += len(self._chunks.popitem(last=False)[1])


class Shared:
    """What all threads of a feeder use. ``report`` is called by the thread that finished a batch's last work."""

    def __init__(
        self,
        ring: Ring,
        segments: Sequence[Segment],
        fields: Sequence[str],
        access: Access,
        *,
        readers: int,
        decoders: int,
        buffers: int,
        token_bytes: int,
        report: Callable[[Batch], None],
    ) -> None:
        self.ring = ring
        self.segments = segments
        self.fields = fields
        self.access = access
        self.root = segments[0].path.parent.parent if segments else None
        self.shards = OpenShards(access.mode, bypass=access.bypasses)
        self.tokens = TokenChunks(token_bytes)
        self.reads = ReadQueue()
        self.decodes = DecodeQueue(decoders)
        self.buffers = Buffers(max(readers + 2, min(readers + decoders + 4, buffers)))
        self.faulted: set[int] = set()
        self.report = report

    def array(self, segment: int, field: int) -> ArrayInfo:
        """Where a field's chunks are in a segment."""
        if segment >= len(self.segments):
            raise DatasetError(f"segment {segment} of a dataset of {len(self.segments)}")
        return self.segments[segment].array(self.fields[field])


class Worker(threading.Thread):
    """A reading or decoding thread. Its row in the ring says what it does at the moment."""

    def __init__(self, shared: Shared, queue: ReadQueue | DecodeQueue, row: int, name: str, kind: int) -> None:
        super().__init__(name=name, daemon=True)
        self.shared = shared
        self.row: npt.NDArray[np.int64] = shared.ring.threads[row]
        self._queue = queue
        self._number = row
        self._kind = kind
        self._scratch: dict[int, Bytes] = {}
        self._path: object = None

    def run(self) -> None:
        """Work until the queue is closed."""
        self.row[ThreadCounter.KIND] = self._kind
        self.row[ThreadCounter.PROCESS] = os.getpid()
        self.row[ThreadCounter.TID] = threading.get_native_id()
        self.stage(Stage.IDLE)
        while (work := self._queue.get()) is not None:
            try:
                if work.batch.cancelled:
                    work.batch.skipped = True
                work.run(self)
            except BaseException:
                # A fault of the reader itself, or no memory: the batch is lost, the thread goes on.
                work.batch.fail(traceback.format_exc(limit=-4))
                self.finish(work.batch)
            del work  # an idle thread holds no batch, buffer or map
            self.stage(Stage.IDLE)
        self.row[ThreadCounter.TID] = 0

    def stage(self, stage: Stage, batch: Batch | None = None, offset: int = 0, length: int = 0) -> int:
        """Say what the thread does now; returns the instant."""
        now = time.monotonic_ns()
        serial = batch.request.serial if batch is not None else 0
        self.row[ThreadCounter.STAGE : ThreadCounter.LENGTH + 1] = (stage, now, serial, offset, length)
        return now

    def working_on(self, array: ArrayInfo, shard: int) -> None:
        """Say which shard the thread works on."""
        key = (array, shard)
        if self._path != key:
            self._path = key
            path = array.shard_path(shard)
            told = path.relative_to(self.shared.root) if self.shared.root else path
            self.shared.ring.write_path(self._number, bytes(told))

    def scratch(self, size: int) -> Bytes:
        """Memory for one decoded chunk, the thread's own."""
        if size not in self._scratch:
            self._scratch.clear()  # the next segment may have chunks of another size; none is kept for ever
            self._scratch[size] = np.empty(size, np.uint8)
        return self._scratch[size]

    def finish(self, batch: Batch, decoded_bytes: int = 0) -> None:
        """Count a piece of work done."""
        if batch.done(decoded_bytes):
            self.shared.report(batch)
