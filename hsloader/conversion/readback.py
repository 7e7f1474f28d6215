"""Reads a sealed segment back from the disk and compares it with what was read from the source.

The segment's files are dropped from the page cache first (they were fsynced when they were sealed), then everything
goes through the same code as a reader of the dataset: metadata, tables, shard indexes, decoder; frames by O_DIRECT.
The rows are compared by the digests that were taken of the source's bits while they were encoded.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
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
from hsloader.store.pages import page_memory
from hsloader.store.samples import COLUMNS, sample_key
from hsloader.store.stored_segment import ArrayInfo, Segment, ShardCache, ShardHandle

__all__ = ["Expected", "drop_from_cache", "read_back"]

Bits = np.ndarray[Any, Any]

_OPEN_SHARDS = 64
_PAGE = 4096
_WINDOW = 4 << 20  # bytes of frames that are read at once
_GROUP = 8 << 20  # raw bytes of samples that one thread compares
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


# A sample, and the first and the end of its chunks.
_Placed = tuple[Expected, int, int]


class _Scratch(threading.local):
    """A thread's memory: a window of a shard, a decoded chunk, and columns of it."""

    def __init__(self) -> None:
        self.window = np.empty(0, np.uint8)
        self.place: tuple[ShardHandle | None, int, int] = (None, 0, 0)  # of what the window holds: first and last byte
        self.chunk = np.empty(0, np.uint8)
        self.columns = np.empty(0, np.uint8)

    def reserve(self, array: ArrayInfo) -> None:
        window = _WINDOW + array.codec.max_frame_bytes + 2 * _PAGE
        if len(self.window) < window:
            self.place = (None, 0, 0)
            self.window = page_memory(window)  # begins on a page, as O_DIRECT wants it
        if len(self.chunk) < array.codec.chunk_bytes:
            self.chunk = np.empty(array.codec.chunk_bytes, np.uint8)
            self.columns = np.empty(array.codec.chunk_bytes, np.uint8)


class _Reader:
    """Reads and decodes single chunks of an array into the calling thread's scratch.

    The frames come from the disk by O_DIRECT, a window of several at a time: that cannot be answered by the page cache,
    fills none, and saves a copy.  Where a file system does not know O_DIRECT they are read as usual.
    """

    def __init__(self) -> None:
        self._shards = ShardCache(_OPEN_SHARDS)
        self._seen: weakref.WeakSet[ShardHandle] = weakref.WeakSet()
        self.scratch = _Scratch()

    def chunk(self, array: ArrayInfo, number: int, last: int) -> Bits:
        """Chunk ``number`` as bits ``[chunk_rows, width]``; valid until this thread's next call.

        The chunks up to ``last`` are going to be asked for next.
        """
        self.scratch.reserve(array)
        handle = self._open(array, number // array.shard_chunks)
        slot = number % array.shard_chunks
        offset, size = (int(x) for x in handle.index[slot])
        if size > array.codec.max_frame_bytes:
            raise DamageError(f"{handle.path}: chunk {number}: a frame of {size} bytes")
        held, begin, end = self.scratch.place
        if held is not handle or not begin <= offset <= offset + size <= end:
            begin = self._fill(handle, slot, min(array.shard_chunks - 1, slot + last - number))
            if offset + size > self.scratch.place[2]:
                raise DamageError(f"{handle.path}: chunk {number}: the file ends within the frame at {offset}")
        frame = self.scratch.window[offset - begin : offset - begin + size]
        out = self.scratch.chunk[: array.codec.chunk_bytes]
        try:
            array.codec.decode(frame, out, verify=True)
        except FrameError as error:
            raise DamageError(f"{handle.path}: chunk {number} at {offset}: {error}") from error
        return out.view(array.field.type.bits).reshape(array.chunk_rows, array.field.width)

    def columns(self, array: ArrayInfo) -> Bits:
        """This thread's memory for columns of a chunk."""
        return self.scratch.columns[: array.codec.chunk_bytes].view(array.field.type.bits)

    def close(self) -> None:
        self._shards.clear()

    def _open(self, array: ArrayInfo, shard: int) -> ShardHandle:
        handle = self._shards.get(array, shard)
        if handle not in self._seen:
            with contextlib.suppress(OSError):
                fcntl.fcntl(handle.fd, fcntl.F_SETFL, os.O_DIRECT)
            self._seen.add(handle)
        return handle

    def _fill(self, handle: ShardHandle, slot: int, last: int) -> int:
        """Read the frames of slots ``slot .. last``, as many as fit; the window's first byte in the file."""
        offsets, sizes = handle.index[slot : last + 1].astype(np.int64).T
        begin = int(offsets[0]) // _PAGE * _PAGE
        count = max(1, int(np.searchsorted(offsets + sizes, begin + _WINDOW, "right")))
        size = -(-(int(offsets[count - 1] + sizes[count - 1]) - begin) // _PAGE) * _PAGE
        into = self.scratch.window[:size].data
        try:
            done = os.preadv(handle.fd, [into], begin)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(handle.fd, fcntl.F_SETFL, 0)  # a file system that wants more than pages for O_DIRECT
            done = os.preadv(handle.fd, [into], begin)
        self.scratch.place = (handle, begin, begin + done)
        return begin


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
        # One more than decode at a time: the caller's thread only waits, and one of them waits for the disk.
        with ThreadPoolExecutor(threads + 1, thread_name_prefix="hsloader-readback") as pool:
            try:
                for array in arrays:
                    for size, group in _groups(array, samples, firsts):
                        pending.append((size, pool.submit(_check_group, reader, array, group)))
                        if len(pending) > 4 * threads:
                            settle()
                while pending:
                    settle()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        reader.close()


def _groups(
    array: ArrayInfo, samples: Sequence[Expected], firsts: Sequence[int]
) -> Iterator[tuple[int, list[_Placed]]]:
    """Consecutive samples of a few megabytes together, with the raw bytes of each group: small ones share a window."""
    size, group = 0, list[_Placed]()
    for sample, first, end in zip(samples, firsts, [*firsts[1:], array.rows], strict=True):
        group.append((sample, first // array.chunk_rows, -(-end // array.chunk_rows)))
        size += sample.length * array.field.row_bytes
        if size >= _GROUP:
            yield size, group
            size, group = 0, []
    if group:
        yield size, group


def _check_group(reader: _Reader, array: ArrayInfo, group: Sequence[_Placed]) -> None:
    last = group[-1][2] - 1
    for placed in group:
        _check_state(reader, array, placed, last)


def _check_state(reader: _Reader, array: ArrayInfo, placed: _Placed, last: int) -> None:
    """Compare one sample's rows of a state field, chunk by chunk; what follows them in its chunks must be zero."""
    sample, begin, stop = placed
    digests, widths = sample.digests[array.field.name], sample.widths[array.field.name]
    for k, number in enumerate(range(begin, stop)):
        rows = reader.chunk(array, number, last)
        held = max(0, min(array.chunk_rows, sample.length - k * array.chunk_rows))
        same = not held or columns_digest(rows[:held], widths, reader.columns(array)) == digests[k]
        if not same or rows[held:].any():
            raise DamageError(f"{array.directory}: chunk {number} differs from sample {sample.name!r}")


def _check_tokens(array: ArrayInfo, samples: Sequence[Expected], firsts: Sequence[int]) -> None:
    """Compare a token field, whose chunks run across samples."""
    reader = _Reader()
    held, last = -1, -(-array.rows // array.chunk_rows) - 1
    rows: Bits = np.empty((0, array.field.width), array.field.type.bits)
    try:
        for sample, first in zip(samples, firsts, strict=True):
            pieces = []
            for number, start, stop in _cuts(first, sample.length, array.chunk_rows):
                if number != held:
                    rows, held = reader.chunk(array, number, last), number
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
