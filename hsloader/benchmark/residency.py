"""What the page cache holds of a file, and how to make it forget files that are ours."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

__all__ = ["drop", "is_told", "read_from_disk", "resident_share", "state_of"]

_PAGE = mmap.PAGESIZE
_STEP = 1 << 30  # bytes of a file that are looked at in one call

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def resident_share(fd: int, start: int = 0, stop: int | None = None) -> float:
    """The share of the pages of bytes ``start:stop`` of a file that are in the page cache; 0 for no bytes.

    Reads no page: mincore(2) on a map that nobody touches. Where it is not told (``is_told``) the answer is "all"; of
    a file system that has no maps, and so no page cache, it is "none".
    """
    stop = os.fstat(fd).st_size if stop is None else stop
    first = start // _PAGE * _PAGE
    pages = held = 0
    while first < stop:
        size = min(_STEP, stop - first)
        try:
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=first)
        except OSError:
            return 0.0
        view = np.frombuffer(memory, np.uint8)
        flags = np.zeros(-(-size // _PAGE), np.uint8)
        if _libc.mincore(view.ctypes.data, size, flags.ctypes.data) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        held += int((flags & 1).sum())
        pages += len(flags)
        first += size
        del view
        memory.close()
    return held / pages if pages else 0.0


def is_told(fd: int) -> bool:
    """Whether the kernel tells this process what it holds of a file: it tells the owner, and who may write to it."""
    return os.geteuid() in (0, os.fstat(fd).st_uid) or os.access(f"/proc/self/fd/{fd}", os.W_OK)


def drop(fd: int) -> None:
    """Drop a file's pages from the page cache. Only for files that this process made or was asked to drop.

    Dirty pages stay: fsync first. Pages that another process maps stay too, so look afterwards.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def state_of(share: float) -> str:
    """``"cold"``, ``"warm"`` or ``"mixed"`` for a resident share."""
    return "cold" if share < 0.05 else "warm" if share > 0.95 else "mixed"


def read_from_disk() -> int | None:
    """Bytes that this process (all threads) has made the kernel fetch from storage so far; None if it won't say."""
    try:
        with open("/proc/self/io", "rb") as file:
            for line in file:
                if line.startswith(b"read_bytes:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return None
