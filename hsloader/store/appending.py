"""A file that grows at its end, past the page cache where it lies on a local disk, and can be cut back to a mark.

Writing through the page cache costs a page, a buffer head and a reservation of space for every 4 KiB, and the fsync
walks over them again: 0.14 s of CPU time for what 1 GB of states becomes.  Gathered into whole pages and written by
O_DIRECT the same bytes cost 0.07.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsloader.store.pages import page_memory

__all__ = ["AppendedFile", "End"]

_BUFFER = 2 << 20  # a huge page, which it is
_PAGE = 4096  # what O_DIRECT wants offsets, lengths and memory to be multiples of, on almost every file system


@dataclass(frozen=True, slots=True)
class End:
    """Where a file ended, with the bytes of its incomplete last page: they are written again with what follows."""

    size: int
    tail: bytes


class AppendedFile:
    """A new file at ``path``, created exclusively (``FileExistsError``). Not safe for threads.

    What is appended reaches the file a buffer at a time, so an error of the disk may be that of earlier bytes; after
    one the file can be appended to, cut back or completed again.
    """

    __slots__ = ("_buffer", "_direct", "_fd", "_held", "_start")

    def __init__(self, path: str) -> None:
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._start = 0  # where in the file the buffer's bytes belong: at the start of a page
        self._held = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._direct = False
        # Only on a block device: a server is better left to the kernel, which has many writes under way at a time.
        if os.major(os.fstat(self._fd).st_dev):
            with contextlib.suppress(OSError):  # a file system that does not know it
                fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_DIRECT)
                self._direct = True

    @property
    def size(self) -> int:
        """Bytes appended."""
        return self._start + self._held

    def append(self, pieces: Sequence[memoryview]) -> None:
        """Append the bytes of ``pieces``: all of them, or none if it raises (``OSError``)."""
        before = self.end()
        try:
            for piece in pieces:
                self._take(np.frombuffer(piece, np.uint8))
        except BaseException:
            self._return_to(before)
            raise

    def end(self) -> End:
        """The present end, for ``cut``."""
        tail = self._held % _PAGE
        return End(self.size, b"" if self._buffer is None else self._buffer[self._held - tail : self._held].tobytes())

    def cut(self, end: End) -> None:
        """Forget what was appended behind ``end``."""
        self._return_to(end)
        os.ftruncate(self._fd, self._start)

    def complete(self) -> None:
        """Write what is held and nothing behind it: a failed append may have left bytes there. May be called again."""
        whole = self._held // _PAGE * _PAGE
        self._write(0, whole)
        if self._held > whole:
            self._write_as_usual()
            self._write(whole, self._held)
        os.ftruncate(self._fd, self.size)

    def sync(self) -> None:
        """Force the completed bytes to the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file and give its memory back. Harmless when closed already."""
        fd, self._fd, self._buffer = self._fd, -1, None
        if fd >= 0:
            os.close(fd)

    def _take(self, data: npt.NDArray[np.uint8]) -> None:
        if self._buffer is None:
            self._buffer = page_memory(_BUFFER)
        while len(data):
            if self._held == _BUFFER:
                self._write(0, _BUFFER)
                self._start, self._held = self._start + _BUFFER, 0
            taken = min(len(data), _BUFFER - self._held)
            self._buffer[self._held : self._held + taken] = data[:taken]
            self._held += taken
            data = data[taken:]

    def _return_to(self, end: End) -> None:
        if end.size < self._start:
            self._start = end.size - len(end.tail)
            assert self._buffer is not None
            self._buffer[: len(end.tail)] = np.frombuffer(end.tail, np.uint8)
        self._held = end.size - self._start

    def _write(self, first: int, last: int) -> None:
        """Write these bytes of the buffer to their place."""
        while first < last:
            assert self._buffer is not None
            try:
                first += os.pwritev(self._fd, [self._buffer[first:last].data], self._start + first)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not self._direct:
                    raise
                self._write_as_usual()  # a file system that wants more than pages, or a write that ended within one

    def _write_as_usual(self) -> None:
        if self._direct:
            self._direct = False
            fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)
