"""Memory that is lent to results and comes back when the last of them is gone.

A fresh allocation of 100 MB costs its page faults each time: a third of the time that decoding into it takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LentMemory"]

_SMALLEST = 1 << 20  # below, the allocator reuses memory by itself
_LARGEST = 256 << 20
_PAGE = 2 << 20
_IDLE_BLOCKS = 4


class LentMemory:
    """Arrays on reused memory: at most ``idle`` unused blocks are kept. Safe for threads and forks.

    Arrays of more than ``largest`` bytes are allocated afresh.
    """

    def __init__(self, *, largest: int = _LARGEST, idle: int = _IDLE_BLOCKS) -> None:
        self._largest = largest
        # Only appended to by finalizers, which may run at any moment and so take no lock; the oldest falls out.
        self._idle: deque[mmap.mmap] = deque(maxlen=idle)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An uninitialised array; its memory is used again once no view of it (or tensor on it) is left."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not _SMALLEST <= size <= self._largest:
            return np.empty(shape, dtype)
        block = self._take(size)
        # The lease is what all views keep alive: numpy and torch hold it as the base of the memory.
        lease = (ctypes.c_char * size).from_buffer(block)
        weakref.finalize(lease, self._idle.append, block).atexit = False
        array: npt.NDArray[Any] = np.frombuffer(memoryview(lease), dtype, count)
        return array.reshape(shape)

    def clear(self) -> None:
        """Give idle blocks back to the system."""
        self._idle.clear()

    def _take(self, size: int) -> mmap.mmap:
        for _ in range(len(self._idle)):
            try:
                block = self._idle.popleft()
            except IndexError:
                break
            if size <= len(block) <= 2 * size + _PAGE:
                return block
            self._idle.append(block)
        block = mmap.mmap(-1, -(-size // _PAGE) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
        return block
