"""Reads a sealed segment back from the disk and compares it with what was read from the source.

The segment's files are dropped from the page cache first (they were fsynced when they were sealed), then everything
goes through the same code as a reader of the dataset: metadata, tables, shard indexes, frames, decoder.  The rows are
compared by the digests that were taken of the source's bits while they were encoded.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsloader.conversion.digests import columns_digest, rows_digest
from hsloader.errors import ConversionError, DamageError
from hsloader.store.codec import FrameError
from hsloader.store.manifest import SegmentEntry
from hsloader.store.samples import COLUMNS, sample_key
from hsloader.store.stored_segment import ArrayInfo, Segment, ShardCache

__all__ = ["Expected", "drop_from_cache", "read_back"]

Bits = np.ndarray[Any, Any]

_OPEN_SHARDS = 64
_FIRST_ROW, _LENGTH, _KEY = COLUMNS.index("first_row"), COLUMNS.index("length"), COLUMNS.index("key")


@dataclass(frozen=True, slots=True)
class Expected:
    """One committed sample as the source gave it.

    ``digests``: for each state field the digest of each chunk's rows, ``widths`` the widths they came in; ``tokens``
    the digest of each token field.
    """

    name: str
    length: int
    digests: Mapping[str, Sequence[int]]
    widths: Mapping[str, tuple[int, ...]]
    tokens: Mapping[str, int]
    extras: Mapping[str, object]


def read_back(
    directory: Path,
    entry: SegmentEntry,
    samples: Sequence[Expected],
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Compare the segment in ``directory`` with ``samples``, in order; ``ConversionError`` for the first difference.

    ``progress`` is told the raw bytes that were compared, a sample and field at a time.
    """
    drop_from_cache(directory)
    try:
        segment = Segment(directory, entry)
        firsts = _check_tables(segment, samples)
        arrays = [segment.array(field.name) for field in segment.meta.fields]
        _check_states([a for a in arrays if not a.field.is_token_field], samples, firsts, threads, progress)
        for array in arrays:
            if array.field.is_token_field:
                _check_tokens(array, samples, firsts)
    except DamageError as error:
        raise _differs(directory, str(error)) from error


def drop_from_cache(directory: Path) -> None:
    """Ask the kernel to forget the pages of every file below ``directory``, so that reading reads the disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _differs(directory: Path, what: str) -> ConversionError:
    return ConversionError(
        f"{directory}: what was written does not read back as it was: {what}. The segment is not listed and no source "
        "was deleted; check the disk and the memory of this machine, then run the same command again"
    )


def _check_tables(segment: Segment, samples: Sequence[Expected]) -> list[int]:
    """Compare names, lengths and extras; the first row of each sample."""
    table = segment.table()
    if table.shape[1] != len(samples):
        raise DamageError(f"{table.shape[1]} samples are stored, {len(samples)} were written")
    for i, sample in enumerate(samples):
        key = int(np.uint64(table[_KEY, i].astype(np.uint64)))
        found = segment.name(i), int(table[_LENGTH, i]), key, segment.extras(i)
        if found != (sample.name, sample.length, sample_key(sample.name), dict(sample.extras)):
            raise DamageError(f"sample {i} is stored as {found[0]!r}, {found[1]} tokens; written was {sample.name!r}")
    return [int(first) for first in table[_FIRST_ROW]]


class _Scratch(threading.local):
    """A thread's memory: a frame, a decoded chunk, and columns of it."""

    def __init__(self) -> None:
        self.frame = np.empty(0, np.uint8)
        self.chunk = np.empty(0, np.uint8)
        self.columns = np.empty(0, np.uint8)

    def reserve(self, array: ArrayInfo) -> None:
        if len(self.frame) < array.codec.max_frame_bytes:
            self.frame = np.empty(array.codec.max_frame_bytes, np.uint8)
        if len(self.chunk) < array.codec.chunk_bytes:
            self.chunk = np.empty(array.codec.chunk_bytes, np.uint8)
            self.columns = np.empty(array.codec.chunk_bytes, np.uint8)


class _Reader:
    """Reads and decodes single chunks of an array into the calling thread's scratch."""

    def __init__(self) -> None:
        self._shards = ShardCache(_OPEN_SHARDS)
        self.scratch = _Scratch()

    def chunk(self, array: ArrayInfo, number: int) -> Bits:
        """Chunk ``number`` as bits ``[chunk_rows, width]``; valid until this thread's next call."""
        self.scratch.reserve(array)
        handle = self._shards.get(array, number // array.shard_chunks)
        offset, size = (int(x) for x in handle.index[number % array.shard_chunks])
        if size > array.codec.max_frame_bytes:
            raise DamageError(f"{handle.path}: chunk {number}: a frame of {size} bytes")
        frame = self.scratch.frame[:size]
        if os.preadv(handle.fd, [frame.data], offset) != size:
            raise DamageError(f"{handle.path}: chunk {number}: the file ends within the frame at {offset}")
        out = self.scratch.chunk[: array.codec.chunk_bytes]
        try:
            array.codec.decode(frame, out, verify=True)
        except FrameError as error:
            raise DamageError(f"{handle.path}: chunk {number} at {offset}: {error}") from error
        return out.view(array.field.type.bits).reshape(array.chunk_rows, array.field.width)

    def expect(self, array: ArrayInfo, first: int, last: int) -> None:
        """Have the kernel fetch the frames of chunks ``first .. last`` while others are decoded."""
        number = first
        while number <= last:
            handle = self._shards.get(array, number // array.shard_chunks)
            stop = min(last, number + array.shard_chunks - 1 - number % array.shard_chunks)
            begin = int(handle.index[number % array.shard_chunks][0])
            offset, size = (int(x) for x in handle.index[stop % array.shard_chunks])
            os.posix_fadvise(handle.fd, begin, offset + size - begin, os.POSIX_FADV_WILLNEED)
            number = stop + 1

    def columns(self, array: ArrayInfo) -> Bits:
        """This thread's memory for columns of a chunk."""
        return self.scratch.columns[: array.codec.chunk_bytes].view(array.field.type.bits)

    def close(self) -> None:
        self._shards.clear()


def _check_states(
    arrays: Sequence[ArrayInfo],
    samples: Sequence[Expected],
    firsts: Sequence[int],
    threads: int,
    progress: Callable[[int], None] | None,
) -> None:
    reader = _Reader()
    pending: deque[tuple[int, Future[None]]] = deque()

    def settle() -> None:
        size, work = pending.popleft()
        work.result()
        if progress is not None:
            progress(size)

    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="hsloader-readback") as pool:
            try:
                for array in arrays:
                    ends = [*firsts[1:], array.rows]
                    for sample, first, end in zip(samples, firsts, ends, strict=True):
                        size = sample.length * array.field.row_bytes
                        pending.append((size, pool.submit(_check_state, reader, array, sample, first, end)))
                        if len(pending) > 4 * threads:
                            settle()
                while pending:
                    settle()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        reader.close()


def _check_state(reader: _Reader, array: ArrayInfo, sample: Expected, first: int, end: int) -> None:
    """Compare one sample's rows of a state field, chunk by chunk; what follows up to row ``end`` must be zero."""
    digests, widths = sample.digests[array.field.name], sample.widths[array.field.name]
    begin, stop = first // array.chunk_rows, -(-end // array.chunk_rows)
    reader.expect(array, begin, stop - 1)
    for k, number in enumerate(range(begin, stop)):
        rows = reader.chunk(array, number)
        held = max(0, min(array.chunk_rows, sample.length - k * array.chunk_rows))
        same = not held or columns_digest(rows[:held], widths, reader.columns(array)) == digests[k]
        if not same or rows[held:].any():
            raise DamageError(f"{array.directory}: chunk {number} differs from sample {sample.name!r}")


def _check_tokens(array: ArrayInfo, samples: Sequence[Expected], firsts: Sequence[int]) -> None:
    """Compare a token field, whose chunks run across samples."""
    reader = _Reader()
    held = -1
    rows: Bits = np.empty((0, array.field.width), array.field.type.bits)
    try:
        for sample, first in zip(samples, firsts, strict=True):
            pieces = []
            for number, start, stop in _cuts(first, sample.length, array.chunk_rows):
                if number != held:
                    rows, held = reader.chunk(array, number), number
                pieces.append(rows[start:stop].copy())
            if rows_digest([np.concatenate(pieces)]) != sample.tokens[array.field.name]:
                raise DamageError(f"{array.directory}: the rows of sample {sample.name!r} differ")
    finally:
        reader.close()


def _cuts(first: int, length: int, chunk_rows: int) -> Iterator[tuple[int, int, int]]:
    """Chunk number and rows within it, for rows ``first .. first + length``."""
    row, end = first, first + length
    while row < end:
        number = row // chunk_rows
        stop = min(end, (number + 1) * chunk_rows)
        yield number, row - number * chunk_rows, stop - number * chunk_rows
        row = stop
