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

from hsloader.conversion.checks import ChunkCheck
from hsloader.conversion.chunks import EncodedChunk, chunk_memory
from hsloader.conversion.fp8 import LossSum
from hsloader.conversion.slots import Slot, Slots
from hsloader.formats.source import RowBuffer
from hsloader.store.codec import Codec
from hsloader.store.fields import Field

__all__ = ["EncodedSample", "Pipeline", "SegmentSink"]

Bits = np.ndarray[Any, Any]

_BYTES_IN_FLIGHT = 192 << 20  # of source rows
_SLOTS_BYTES = 512 << 20  # of all slots together: source rows, and what the encoders of each field hold
_SLOTS_KEPT_BYTES = 128 << 20  # of those that are kept for the next segment, while this one is read back
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
    the rows came in (a digest runs over them one after another).  ``losses`` are those of fields made fp8.
    """

    name: str
    length: int
    nans: int = 0
    infinities: int = 0
    first_bad: tuple[str, int] | None = None
    zero_rows: int = 0
    digests: dict[str, list[int]] = field(default_factory=dict)
    widths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    losses: dict[str, LossSum] = field(default_factory=dict)
    _scales: dict[str, list[Bits]] = field(default_factory=dict)

    @property
    def scales(self) -> dict[str, Bits]:
        """For fields made fp8: the scales, float32 ``[length]``, by the field's name."""
        return {name: np.concatenate(scales) for name, scales in self._scales.items()}

    def problem(self) -> str | None:
        """Why the sample is not to be kept, or None."""
        if self.first_bad is None:
            return None
        name, row = self.first_bad
        return (
            f"{name}: values that are not finite: {self.nans} NaN, {self.infinities} Inf (first at token {row}); "
            "training on them destroys a model, so the sample is left out"
        )

    def add(self, name: str, start: int, chunk: EncodedChunk) -> None:
        """Take in one chunk, which begins at token ``start``."""
        self.count(name, start, chunk.check)
        self.digests.setdefault(name, []).append(chunk.digest)
        self.widths.setdefault(name, chunk.widths)
        if chunk.fp8 is not None:
            self._scales.setdefault(name, []).append(chunk.fp8.scale)
            self.losses.setdefault(name, LossSum()).add(chunk.fp8.loss)

    def count(self, name: str, start: int, check: ChunkCheck) -> None:
        """Take in what was found in rows that begin at token ``start``."""
        self.nans += check.nans
        self.infinities += check.infinities
        if check.first_row >= 0 and self.first_bad is None:
            self.first_bad = (name, start + check.first_row)
        self.zero_rows += check.zero_rows


@dataclass(slots=True)
class _Chunk:
    slot: Slot
    field_name: str
    start: int
    work: Future[EncodedChunk]


@dataclass(slots=True)
class _Begin:
    sample: EncodedSample


@dataclass(slots=True)
class _End:
    settle: Callable[[EncodedSample], None]


class Pipeline:
    """Feeds one segment's writer. Use as a context manager; leaving it by an error forgets what is in flight.

    ``digest`` records a digest of every chunk's rows for the read-back.  ``slots`` is the memory of the chunks, this
    pipeline's until it is left.
    """

    def __init__(self, sink: SegmentSink, fields: Sequence[Field], threads: int, *, digest: bool, slots: Slots) -> None:
        self._sink = sink
        self._codecs: Mapping[str, Codec] = {f.name: sink.codec(f.name) for f in fields}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hsloader-encode")
        memory = [chunk_memory(codec) for codec in self._codecs.values()]
        self._kept = _KEPT_CHUNKS * max((read for read, _ in memory), default=0)
        slot_bytes = max(1, self._kept + sum(encoding for _, encoding in memory))
        # Few: what was read should still be in the cache when it is encoded, and what was encoded when it is written.
        count = max(threads + 1, min(2 * threads, _SLOTS_BYTES // slot_bytes))
        keep = _SLOTS_KEPT_BYTES // slot_bytes
        self._free = slots.take(list(self._codecs.values()), count, keep=keep, digest=digest)
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
        slot = self._free.pop()
        self._bytes += slot.buffer.nbytes
        self._steps.append(_Chunk(slot, name, start, self._pool.submit(self._work, slot, name, parts)))

    def end(self, settle: Callable[[EncodedSample], None]) -> None:
        """No more chunks of this sample: when all are written, ``settle`` commits it or rolls it back."""
        self._open = None
        self._steps.append(_End(settle))

    def _work(self, slot: Slot, name: str, parts: Sequence[Bits]) -> EncodedChunk:
        """In a thread: everything that touches the rows, one after another while they are in the cache."""
        return slot.encoder(self._codecs[name])(parts)

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
        chunk = step.work.result()
        sample.add(step.field_name, step.start, chunk)
        if sample.first_bad is None:
            self._sink.append(step.field_name, chunk.frame)
        self._bytes -= step.slot.buffer.nbytes
        if step.slot.buffer.nbytes > self._kept:  # grown for a source whose rows lie far apart
            step.slot.buffer = RowBuffer()
        self._free.append(step.slot)
