"""The beginning of a file, as long as needed: plain, or inflated from gzip as it is asked for."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

from hsloader.errors import SourceError

__all__ = ["GZIP_MAGIC", "FileWindow", "GzipStream", "GzipWindow", "Window"]

GZIP_MAGIC = b"\x1f\x8b"
_STEP = 1 << 18
_HEAD_STEP = 1 << 14


class Window(Protocol):
    """The beginning of a file."""

    def first(self, count: int) -> bytes:
        """The first ``count`` bytes, or all if there are fewer."""


class FileWindow:
    """The beginning of a plain file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def first(self, count: int) -> bytes:
        """The first ``count`` bytes, or all if there are fewer."""
        data = b""
        while len(data) < count:
            more = os.pread(self._fd, count - len(data), len(data))
            if not more:
                break
            data += more
        return data


class GzipStream:
    """Inflates a gzip file piece by piece, in bounded memory; the CRC-32 and the length at its end are checked."""

    def __init__(self, fd: int, path: str, step: int = _STEP) -> None:
        self._fd = fd
        self._path = path
        self._step = step  # compressed bytes read at a time
        self._at = 0
        self._tail = b""
        self._inflater = _inflater()

    def pieces(self, limit: int) -> Iterator[bytes]:
        """Yield the inflated bytes, at most ``limit`` at a time; ``SourceError`` where the file is cut or damaged."""
        while True:
            if not self._tail:
                self._tail = self._more()
            given = len(self._tail)
            try:
                piece = self._inflater.decompress(self._tail, limit)
            except Exception as error:  # zlib.error or isal's, which share no base
                raise SourceError(self._path, f"the gzip stream is damaged (corrupt): {error}") from None
            self._tail = self._inflater.unconsumed_tail
            if piece:
                yield piece
            if self._inflater.eof:
                if not self._next_member():
                    return
            elif not given and not piece:
                raise SourceError(
                    self._path, f"truncated: the gzip stream has no end ({self._at} bytes; the writer was killed?)"
                )

    def _more(self) -> bytes:
        """The next compressed bytes; none at the end of the file."""
        try:
            data = os.pread(self._fd, self._step, self._at)
        except OSError as error:
            raise SourceError(self._path, f"reading the gzip stream at {self._at}: {error.strerror}") from error
        self._at += len(data)
        return data

    def _next_member(self) -> bool:
        """Whether another gzip member follows the one that ended; anything else that follows is damage."""
        rest: bytes = self._inflater.unused_data
        if len(rest) < len(GZIP_MAGIC):
            rest += self._more()
        if not rest:
            return False
        if not rest.startswith(GZIP_MAGIC):
            raise SourceError(self._path, "bytes follow the end of the gzip stream: the file is damaged")
        self._tail = rest
        self._inflater = _inflater()
        return True


def _inflater() -> Any:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.decompressobj(31)
    return isal_zlib.decompressobj(31)


class GzipWindow:
    """The beginning of what a gzip file inflates to."""

    def __init__(self, fd: int, path: str) -> None:
        self._pieces = GzipStream(fd, path, _HEAD_STEP).pieces(_HEAD_STEP)
        self._data = bytearray()
        self._ended = False

    def first(self, count: int) -> bytes:
        """The first ``count`` bytes, or all if there are fewer."""
        while len(self._data) < count and not self._ended:
            piece = next(self._pieces, None)
            if piece is None:
                self._ended = True
            else:
                self._data += piece
        return bytes(memoryview(self._data)[:count])
