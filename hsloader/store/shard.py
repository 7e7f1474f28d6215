"""Shard files: frames one after another, their index last (zarr v3 ``sharding_indexed``, ``index_location`` end).

A shard is written as it grows, so a writer needs memory for one chunk, and is cut back to a mark when a sample turns
out to be bad.  Gaps between frames (alignment) are zero bytes; the format allows them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from hsloader.store.appending import AppendedFile, End
from hsloader.store.files import OUT_OF_RESOURCES

__all__ = [
    "ABSENT",
    "INDEX_CODECS",
    "Mark",
    "ShardError",
    "ShardRecord",
    "ShardWriter",
    "frame_crc",
    "index_bytes",
    "index_crc",
    "read_index",
    "shard_digest",
]

Index = np.ndarray[Any, np.dtype[np.uint64]]

ABSENT = 2**64 - 1  # offset and length of a chunk that the shard does not hold
INDEX_CODECS: list[dict[str, Any]] = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]

_CRC_BYTES = 4
_ZEROS = bytes(4096)


class ShardError(ValueError):
    """A shard's index is damaged.  The message has no path; the caller knows it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a growing shard to come back to."""

    count: int
    end: End


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What a segment's metadata says of a sealed shard.

    ``chunks`` held, ``size`` of the file in bytes, ``index_crc`` the index's crc32c, ``digest`` as ``shard_digest``.
    """

    chunks: int
    size: int
    index_crc: int
    digest: str


def index_bytes(slots: int) -> int:
    """Bytes of an encoded index of ``slots`` chunks, with its crc32c."""
    return 16 * slots + _CRC_BYTES


def index_crc(index: Index) -> int:
    """The crc32c of an index ``[slots, 2]`` of (offset, length)."""
    return int(crc32c(index.astype("<u8").tobytes()))


def frame_crc(frame: memoryview | np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """The crc32c that a frame carries in its last four bytes."""
    return int.from_bytes(bytes(frame[-_CRC_BYTES:]), "little")


def shard_digest(index: Index, crcs: Sequence[int] | np.ndarray[Any, Any]) -> str:
    """SHA-256 (hex) over the index (without its crc32c) and the crc32c of each held frame in slot order, ``<u4``."""
    digest = hashlib.sha256(index.astype("<u8").tobytes())
    digest.update(np.asarray(crcs, "<u4").tobytes())
    return digest.hexdigest()


class ShardWriter:
    """Writes one shard file of ``slots`` chunks; created exclusively, so an existing path raises ``FileExistsError``.

    Not safe for threads.  Every ``OSError`` (a full disk) names the path; the writer can then still be rolled back or
    aborted, and what failed can be tried again, except after a failed fsync: the kernel has dropped what it could not
    write, and a second fsync would not tell.
    """

    __slots__ = ("_crcs", "_done", "_file", "_index", "_path", "_slots", "_unsynced")

    def __init__(self, path: str | Path, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a shard of {slots} chunks")
        self._path = os.fspath(path)
        self._slots = slots
        self._index: Index = np.full((slots, 2), ABSENT, "<u8")
        self._crcs: list[int] = []
        self._done = False  # sealed or aborted
        self._unsynced: OSError | None = None
        self._file = AppendedFile(self._path)

    @property
    def count(self) -> int:
        """Chunks appended so far."""
        return len(self._crcs)

    @property
    def size(self) -> int:
        """Bytes of the frames and gaps so far, without the index."""
        return self._file.size

    def append(self, frame: memoryview, align: int = 1) -> None:
        """Append the next chunk's frame (with its crc32c) at the next multiple of ``align`` bytes."""
        if self.count == self._slots:
            raise ValueError(f"{self._path}: all {self._slots} chunks of the shard are written")
        gap = -self.size % align
        start = self.size + gap
        with self._named_errors():
            self._file.append([*_zeros(gap), frame])
        self._index[self.count] = start, len(frame)
        self._crcs.append(frame_crc(frame))

    def mark(self) -> Mark:
        """The present place, for ``rollback``."""
        return Mark(self.count, self._file.end())

    def rollback(self, mark: Mark) -> None:
        """Forget what was appended since ``mark``, also after a failed ``append``."""
        if mark.count > self.count or mark.end.size > self.size:
            raise ValueError(
                f"{self._path}: the mark (chunk {mark.count}) lies ahead of the shard's {self.count} chunks"
            )
        with self._named_errors():
            self._file.cut(mark.end)
        self._index[mark.count :] = ABSENT
        del self._crcs[mark.count :]

    def trim(self) -> int:
        """Leave room for no more chunks than are held, so that the index has no empty slots; how many those are."""
        if self.count:
            self._slots = self.count
            self._index = self._index[: self._slots]
        return self._slots

    def seal(self, fsync: bool = True) -> ShardRecord:
        """Write the index, close the file and describe it.  ``fsync`` forces the bytes to the disk first."""
        if self._unsynced is not None:
            raise self._unsynced
        crc = index_crc(self._index)
        tail = self._index.tobytes() + crc.to_bytes(_CRC_BYTES, "little")
        frames = self._file.end()
        with self._named_errors():
            try:
                self._file.append([memoryview(tail)])
                self._file.complete()
            except BaseException:
                self._file.cut(frames)
                raise
            size = self._file.size
            if fsync:
                self._sync()
            self._file.close()
        self._done = True
        return ShardRecord(self.count, size, crc, shard_digest(self._index, self._crcs))

    def abort(self) -> None:
        """Close and delete the file.  Harmless when it is sealed, aborted or gone already."""
        if self._done:
            return
        self._done = True
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            Path(self._path).unlink()

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError as error:
            self._unsynced = OSError(error.errno, error.strerror, self._path)
            raise

    @contextlib.contextmanager
    def _named_errors(self) -> Any:
        try:
            yield
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, self._path) from error


def _zeros(gap: int) -> list[memoryview]:
    if not gap:
        return []
    return [memoryview(_ZEROS if gap <= len(_ZEROS) else bytes(gap))[:gap]]


def read_index(fd: int, size: int, slots: int, *, crc: int | None = None) -> Index:
    """The index of the shard of ``size`` bytes open at ``fd``: ``uint64 [slots, 2]`` of (offset, length).

    Absent chunks are ``ABSENT`` twice.  Raises ``ShardError`` if the file is shorter, the checksum is wrong (or not
    ``crc``, the one that the segment's metadata recorded), or a range leaves the file or overlaps another.
    """
    tail = index_bytes(slots)
    if size < tail:
        raise ShardError(f"{size} bytes are shorter than the index of {slots} chunks ({tail} bytes)")
    try:
        data = os.pread(fd, tail, size - tail)
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            raise
        raise ShardError(f"its {tail} bytes at {size - tail} cannot be read: {error.strerror}") from error
    if len(data) != tail:
        raise ShardError(f"the file ends before byte {size}: {len(data)} of {tail} index bytes could be read")
    stored = int.from_bytes(data[-_CRC_BYTES:], "little")
    found = crc32c(data[:-_CRC_BYTES])
    if found != stored:
        raise ShardError(f"the index's crc32c is {found:#010x}, the shard says {stored:#010x}")
    if crc is not None and found != crc:
        raise ShardError(f"the index's crc32c is {found:#010x}, the segment recorded {crc:#010x}: not its shard")
    index: Index = np.frombuffer(data, "<u8", 2 * slots).reshape(slots, 2)
    _check_ranges(index, size - tail)
    return index


def _check_ranges(index: Index, end: int) -> None:
    """Raise ``ShardError`` unless the held ranges lie before ``end`` and apart from one another."""
    held = index[(index != np.uint64(ABSENT)).any(axis=1)]
    offsets, lengths = held[:, 0], held[:, 1]
    # Compared without adding: a sum of two hostile numbers could wrap round.
    outside = (offsets > end) | (lengths == 0) | (lengths > np.uint64(end) - np.minimum(offsets, np.uint64(end)))
    if outside.any():
        offset, length = held[np.argmax(outside)]
        raise ShardError(
            f"the index places a chunk at byte {offset}, {length} bytes long, outside the first {end} bytes"
        )
    order = np.argsort(offsets, kind="stable")
    ends = offsets[order] + lengths[order]
    overlap = ends[:-1] > offsets[order][1:]
    if overlap.any():
        raise ShardError(
            f"the index places two chunks over each other at byte {offsets[order][1:][np.argmax(overlap)]}"
        )
