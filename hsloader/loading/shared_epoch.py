"""SharedEpoch: one page of memory through which ``set_epoch`` reaches the workers of a torch DataLoader.

Workers have copies of the dataset, and persistent ones never get another, so the epoch must be shared memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from multiprocessing import context, reduction
from typing import Any

import numpy as np

__all__ = ["SharedEpoch"]

_PAGE = mmap.PAGESIZE
_FIRST = 2  # places: the epoch, how often it was set, then one a worker
_WORKERS = _PAGE // 8 - _FIRST


class SharedEpoch:
    """The epoch that the next iteration shall be, and which workers have begun it."""

    def __init__(self, epoch: int) -> None:
        self._map(_memory())
        self.epoch = epoch

    def _map(self, fd: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._places = np.frombuffer(mmap.mmap(fd, _PAGE), np.int64)

    @property
    def epoch(self) -> int:
        """The epoch; setting it counts, also to the same number."""
        return int(self._places[0])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._places[0] = epoch
        self._places[1] += 1

    def begun(self, worker: int) -> bool:
        """Note that a worker begins the epoch; True if it did so before, since the epoch was set."""
        place = _FIRST + worker % _WORKERS
        before = self._places[place] == self._places[1]
        self._places[place] = self._places[1]
        return bool(before)

    def close(self) -> None:
        """Give the memory back; from now on the epoch is this process's alone."""
        self._places = self._places.copy()
        self._close()

    def __getstate__(self) -> dict[str, Any]:
        # While a worker is being spawned the descriptor travels with it; any other pickle is of the number alone.
        spawning = context.get_spawning_popen() is not None and self._close.alive
        return {"epoch": self.epoch, "fd": reduction.DupFd(self._fd) if spawning else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shared = state["fd"]
        self._map(_memory() if shared is None else shared.detach())
        if shared is None:
            self.epoch = state["epoch"]


def _memory() -> int:
    """A descriptor of a page of memory without a name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hsloader-epoch", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _PAGE)
    return fd
