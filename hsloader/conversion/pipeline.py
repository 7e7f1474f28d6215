"""Chunks on their way from a source to a segment: read in order, checked and encoded by threads, appended in order.

One thread (the caller's) reads and appends; the encoder threads get a chunk each.  What is in flight is a queue of
steps in the order of the output, bounded in number and in bytes: a step is settled (its frame appended, its sample
committed or rolled back) when room is needed for the next one.  So memory does not depend on the size of a sample or
of a shard, samples of one chunk keep the threads as busy as long ones, and the output does not depend on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from hsloader.conversion.checks import ChunkCheck, StateCheck
from hsloader.conversion.digests import rows_digest
from hsloader.formats.source import RowBuffer
from hsloader.store.codec import Codec, Encoder
from hsloader.store.fields import Field

__all__ = ["EncodedSample", "Pipeline", "SegmentSink"]

Bits = np.ndarray[Any, Any]

_BYTES_IN_FLIGHT = 192 << 20  # of source rows
_SLOTS_BYTES = 512 << 20  # of all slots together: source rows, and an encoder's two chunks for each field
_KEPT_CHUNKS = 4  # a slot keeps memory for so many chunks: rows of interleaved layers span as much


class SegmentSink(Protocol):
    """The part of ``store.segment.SegmentWriter`` that a pipeline writes to."""

    def codec(self, field_name: str) -> Codec: ...
    def begin(self, name: str, length: int) -> None: ...
    def append(self, field_name: str, frame: memoryview) -> None: ...
    def rollback(self) -> None: ...


@dataclass(slots=True)
class EncodedSample:
    """What became known of one sample's states on the way; complete when its end is settled.

    ``digests`` holds for each state field the digest of each chunk's rows, ``widths`` the widths of the arrays that
    the rows came in (a digest runs over them one after another).
    """

    name: str
    length: int
    nans: int = 0
    infinities: int = 0
    first_bad: tuple[str, int] | None = None
    zero_rows: int = 0
    digests: dict[str, list[int]] = field(default_factory=dict)
    widths: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def problem(self) -> str | None:
        """Why the sample is not to be kept, or None."""
        if self.first_bad is None:
            return None
        name, row = self.first_bad
        return (
            f"{name}: values that are not finite: {self.nans} NaN, {self.infinities} Inf (first at token {row}); "
            "training on them destroys a model, so the sample is left out"
        )

    def add(self, name: str, start: int, check: ChunkCheck, digest: int) -> None:
        """Take in one chunk, which begins at token ``start``."""
        self.nans += check.nans
        self.infinities += check.infinities
        if check.first_row >= 0 and self.first_bad is None:
            self.first_bad = (name, start + check.first_row)
        self.zero_rows += check.zero_rows
        self.digests.setdefault(name, []).append(digest)


class _Slot:
    """Room for one chunk in flight: the memory its rows are read into, and an encoder for each field."""

    __slots__ = ("buffer", "encoders")

    def __init__(self) -> None:
        self.buffer = RowBuffer()
        self.encoders: dict[str, Encoder] = {}

    def encoder(self, name: str, codec: Codec) -> Encoder:
        """This slot's encoder of a field; its last frame lives until the slot is used again."""
        made = self.encoders.get(name)
        if made is None:
            made = self.encoders[name] = codec.encoder()
        return made


@dataclass(slots=True)
class _Chunk:
    slot: _Slot
    field_name: str
    start: int
    work: Future[tuple[ChunkCheck, int, memoryview]]


@dataclass(slots=True)
class _Begin:
    sample: EncodedSample


@dataclass(slots=True)
class _End:
    settle: Callable[[EncodedSample], None]


class Pipeline:
    """Feeds one segment's writer. Use as a context manager; leaving it by an error forgets what is in flight.

    ``digest`` records a digest of every chunk's rows for the read-back.
    """

    def __init__(self, sink: SegmentSink, fields: Sequence[Field], threads: int, *, digest: bool) -> None:
        self._sink = sink
        self._digest = digest
        self._checks = {f.name: StateCheck(f.dtype, f.type.bits) for f in fields}
        self._codecs: Mapping[str, Codec] = {f.name: sink.codec(f.name) for f in fields}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hsloader-encode")
        chunks = [codec.chunk_bytes for codec in self._codecs.values()]
        self._kept = _KEPT_CHUNKS * max(chunks, default=0)
        slot_bytes = max(1, self._kept + 2 * sum(chunks))
        self._free = [_Slot() for _ in range(max(threads + 1, min(2 * threads + 1, _SLOTS_BYTES // slot_bytes)))]
        self._steps: deque[_Begin | _Chunk | _End] = deque()
        self._bytes = 0
        self._open: EncodedSample | None = None  # the sample that is being read
        self._settling: EncodedSample | None = None  # the sample that is being written

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                while self._steps:
                    self._settle()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, name: str, length: int) -> None:
        """The chunks that follow belong to this sample."""
        self._open = EncodedSample(name, length)
        self._steps.append(_Begin(self._open))

    def buffer(self) -> RowBuffer:
        """Memory for the next chunk's rows; waits for older chunks until there is room."""
        while not self._free or self._bytes > _BYTES_IN_FLIGHT:
            self._settle()
        return self._free[-1].buffer

    def put(self, name: str, start: int, parts: Sequence[Bits]) -> None:
        """Check and encode rows of a field, ``parts`` side by side; they lie in the memory ``buffer`` gave."""
        assert self._open is not None
        self._open.widths.setdefault(name, tuple(part.shape[1] for part in parts))
        slot = self._free.pop()
        self._bytes += slot.buffer.nbytes
        self._steps.append(_Chunk(slot, name, start, self._pool.submit(self._work, slot, name, parts)))

    def end(self, settle: Callable[[EncodedSample], None]) -> None:
        """No more chunks of this sample: when all are written, ``settle`` commits it or rolls it back."""
        self._open = None
        self._steps.append(_End(settle))

    def _work(self, slot: _Slot, name: str, parts: Sequence[Bits]) -> tuple[ChunkCheck, int, memoryview]:
        """In a thread: everything that touches the rows, one after another while they are in the cache."""
        check = self._checks[name](parts)
        digest = rows_digest(parts) if self._digest else 0
        return check, digest, slot.encoder(name, self._codecs[name]).encode(parts)

    def _settle(self) -> None:
        """Bring the oldest step to its end."""
        step = self._steps.popleft()
        if isinstance(step, _Begin):
            self._settling = step.sample
            self._sink.begin(step.sample.name, step.sample.length)
            return
        sample = self._settling
        assert sample is not None
        if isinstance(step, _End):
            self._settling = None
            step.settle(sample)
            return
        check, digest, frame = step.work.result()
        sample.add(step.field_name, step.start, check, digest)
        if sample.first_bad is None:
            self._sink.append(step.field_name, frame)
        self._bytes -= step.slot.buffer.nbytes
        if step.slot.buffer.nbytes > self._kept:  # grown for a source whose rows lie far apart
            step.slot.buffer = RowBuffer()
        self._free.append(step.slot)
