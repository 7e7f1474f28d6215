"""Opens shards and reads byte ranges of them in one of three ways: mmap, pread, O_DIRECT.

A mapped shard may have a bypass: what is not in memory is then read by O_DIRECT, past the page cache, either always
(the data do not fit the memory) or while the decoders have enough to do: a page that the cache takes in costs more CPU
time than a read into a buffer that is used again and again, which pays only where the disk is what limits.

All ways check what they got: a range that ends early is damage with the file's name, not zeros. Under ``mmap`` a
range is brought in by MADV_POPULATE_READ, which reports a truncated file or a disk error as an error code where a
plain access would end the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import queue
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from hsloader.errors import DamageError
from hsloader.store.pages import page_memory
from hsloader.store.stored_segment import OPEN_SHARDS, ArrayInfo, ShardHandle

__all__ = ["Access", "Buffer", "Buffers", "Bypass", "OpenShard", "OpenShards", "populate_for_writing"]

Bytes = npt.NDArray[np.uint8]

Bypass = Literal["never", "busy", "always"]

_PAGE = mmap.PAGESIZE
_HUGE = 2 << 20
# Samples of so many encoded bytes are brought in by pages of 2 MiB: measured cold, 0.03 s of CPU time a GB where 4 KiB
# pages take 0.3, and twice the rate. For smaller ones the ends that a 2 MiB page reads in vain would cost more.
LARGE_SAMPLE = 16 << 20

_DIRECT_ALIGNMENT = 4096  # of offset, length and address; no disk in use wants more
# Shorter ranges (chunks of token fields, which many batches share) always go through the page cache.
_LEAST_BYPASS = 128 << 10
# How fast "the decoders have enough to do" changes its mind: about so many reads.
_MEMORY = 32

_RANDOM, _WILLNEED, _DONTNEED, _HUGEPAGE = 1, 3, 4, 14
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # Linux 5.14

# mmap.madvise holds the GIL, and populating waits for the disk: ctypes releases it.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# mincore only looks: microseconds, for which giving up the GIL and getting it back would cost more.
_quick = ctypes.PyDLL(None)
_quick.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def populate_for_writing(memory: Bytes) -> None:
    """Give every page that ``memory`` touches its place, faster than faults one by one would."""
    ahead = memory.ctypes.data % _PAGE
    _libc.madvise(memory.ctypes.data - ahead, memory.nbytes + ahead, _POPULATE_WRITE)


class OpenShard:
    """An open shard: the store's handle, and what the read mode needs (a map, or a second descriptor)."""

    __slots__ = ("__weakref__", "address", "direct", "handle", "index", "large", "map", "path", "tells")

    def __init__(self, handle: ShardHandle, mode: str, large: bool, bypass: bool = False) -> None:
        self.handle = handle
        self.path: Path = handle.path
        self.index = handle.index
        self.large = large
        self.map: Bytes | None = None
        self.address = 0
        self.direct = -1
        self.tells = False  # whether the kernel says what of it is in memory
        if mode == "mmap":
            # Both the map and the array live until the last view of them is gone.
            self.map = np.frombuffer(mmap.mmap(handle.fd, handle.size, prot=mmap.PROT_READ), np.uint8)
            self.address = self.map.ctypes.data
            # Of files that others own and we may not write, mincore says that all is there.
            owner = os.fstat(handle.fd).st_uid
            self.tells = hasattr(_quick, "mincore") and (owner == os.geteuid() or os.access(handle.path, os.W_OK))
            if large:
                # In this order the kernel reads exactly the huge pages that are touched, and none ahead of them.
                refused = _libc.madvise(self.address, handle.size, _HUGEPAGE)
                self.large = not refused and not _libc.madvise(self.address, handle.size, _RANDOM)
        if mode == "direct":
            self.direct = os.open(handle.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        elif bypass and self.tells:
            with contextlib.suppress(OSError):  # a segment may lie on another file system than the manifest
                self.direct = os.open(handle.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        elif mode == "pread" and large and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __del__(self) -> None:
        if self.direct >= 0:
            os.close(self.direct)


class OpenShards:
    """The shards that are open, at most ``capacity``; each stays open for as long as somebody holds it."""

    def __init__(self, mode: str, capacity: int = OPEN_SHARDS, *, bypass: bool = False) -> None:
        self._mode = mode
        self._bypass = bypass
        self._capacity = capacity
        self._open: OrderedDict[tuple[Path, int], OpenShard] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def find(self, array: ArrayInfo, shard: int) -> OpenShard | None:
        """The shard if it is open."""
        key = (array.directory, shard)
        with self._lock:
            found = self._open.get(key)
            if found is not None:
                self._open.move_to_end(key)
            return found

    def get(self, array: ArrayInfo, shard: int, samples: int) -> OpenShard:
        """The shard, opened and its index checked if need be; ``DamageError`` or ``OSError`` with its path.

        ``samples``: those of the array's segment, which tell how long their byte ranges are.
        """
        found = self.find(array, shard)
        if found is not None:
            return found
        large = sum(record.size for record in array.records) >= samples * LARGE_SAMPLE
        opened = OpenShard(array.open_shard(shard), self._mode, large, self._bypass)
        dropped = []
        with self._lock:
            opened = self._open.setdefault((array.directory, shard), opened)
            while len(self._open) > self._capacity:
                dropped.append(self._open.popitem(last=False))
        return opened

    def forget(self, array: ArrayInfo, shard: int) -> None:
        """Open the shard anew next time: a read of it failed."""
        with self._lock:
            self._open.pop((array.directory, shard), None)

    def clear(self) -> None:
        """Let all go."""
        with self._lock:
            self._open.clear()


class Buffer:
    """Memory for one read (see ``page_memory``), made on first use and grown when a read needs more."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def take(self, size: int) -> Bytes:
        """The first ``size`` bytes of the buffer, a multiple of the page."""
        if len(self._memory) < size:
            self._memory = page_memory(size)
        return self._memory[:size]


class Buffers:
    """A fixed number of buffers. They bound how far reading runs ahead of decoding."""

    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(Buffer())

    def take(self) -> Buffer:
        """A free buffer; waits for one."""
        return self._free.get()

    def give(self, buffer: Buffer) -> None:
        """Return a buffer."""
        self._free.put(buffer)


class Access:
    """Reads byte ranges of open shards in ``mode``; with ``drop_pages`` those ``consumed`` leave the page cache.

    ``bypass``: when what is not in memory is read past the page cache, of shards that are mapped.
    """

    def __init__(self, mode: str, drop_pages: bool, bypass: Bypass = "never") -> None:
        self.mode = mode
        self._bypass = bypass
        self._hungry = 0.0  # the share of recent reads that the decoders waited for
        self.drop_pages = drop_pages and hasattr(os, "posix_fadvise")
        self._populate = True

    @property
    def bypasses(self) -> bool:
        """Whether any range may be read past the page cache of a mapped shard."""
        return self._bypass != "never"

    def resident(self, shard: OpenShard, start: int, stop: int) -> Bytes | None:
        """The bytes ``[start, stop)`` of a mapped shard if all are in memory: then there is nothing to read."""
        if shard.map is None or not shard.tells:
            return None
        first = start // _PAGE * _PAGE
        pages = np.empty(-(-(stop - first) // _PAGE), np.uint8)
        if _quick.mincore(shard.address + first, stop - first, pages.ctypes.data) or not (pages & 1).all():
            return None
        return shard.map[start:stop]

    def read(self, shard: OpenShard, start: int, stop: int, buffer: Buffer) -> Bytes:
        """The bytes ``[start, stop)`` of the shard: a view of its map or of ``buffer``."""
        if shard.map is not None and not self._goes_past(shard, stop - start):
            self._bring_in(shard, start, stop)
            return shard.map[start:stop]
        if shard.direct >= 0:
            first = start // _DIRECT_ALIGNMENT * _DIRECT_ALIGNMENT
            room = buffer.take(-(-(stop - first) // _DIRECT_ALIGNMENT) * _DIRECT_ALIGNMENT)
            try:
                _fill(shard, shard.direct, room, first, stop)
            except OSError as error:
                if shard.map is None or error.errno != errno.EINVAL:
                    raise
                self._bypass = "never"  # refused after all
                return self.read(shard, start, stop, buffer)
            return room[start - first : stop - first]
        room = buffer.take(stop - start)
        _fill(shard, shard.handle.fd, room, start, stop)
        return room

    def arrived(self, awaited: bool) -> None:
        """A read is done; ``awaited``: the decoders have nothing else to do."""
        self._hungry += (awaited - self._hungry) / _MEMORY

    def _goes_past(self, shard: OpenShard, size: int) -> bool:
        if shard.direct < 0 or size < _LEAST_BYPASS:
            return False
        return self._bypass == "always" or (self._bypass == "busy" and self._hungry < 0.5)

    def consumed(self, shard: OpenShard, start: int, stop: int, last: bool) -> int:
        """Give back the pages of a range that was decoded; the bytes they held.

        The kernel keeps a page of which only a part is given back, and pages may have 2 MiB: one that two ranges share
        goes with the second of them, or with this one if it is the ``last`` hereabouts. A mapped page is given back by
        the map first, or the kernel keeps it.
        """
        if not self.drop_pages or (shard.map is None and shard.direct >= 0):
            return 0
        first = start // _HUGE * _HUGE
        end = min(shard.handle.size, -(-stop // _HUGE) * _HUGE) if last else stop // _HUGE * _HUGE
        if end <= first:
            return 0
        if shard.map is not None:
            _libc.madvise(shard.address + first, end - first, _DONTNEED)
        os.posix_fadvise(shard.handle.fd, first, end - first, os.POSIX_FADV_DONTNEED)
        return end - first

    def _bring_in(self, shard: OpenShard, start: int, stop: int) -> None:
        first = start // _PAGE * _PAGE
        where, size = shard.address + first, stop - first
        if not shard.large:
            _libc.madvise(where, size, _WILLNEED)  # starts the reads of the whole range at once
        if not self._populate:
            return
        while _libc.madvise(where, size, _POPULATE_READ) != 0:
            problem = ctypes.get_errno()
            if problem in (errno.EINTR, errno.EAGAIN):
                continue
            if problem == errno.EINVAL:  # a kernel before 5.14; the decoders' accesses then wait for the disk
                self._populate = False
                return
            _explain(shard, start, stop, problem)


def _fill(shard: OpenShard, fd: int, room: Bytes, start: int, stop: int) -> None:
    """Read ``[start, stop)`` into the beginning of ``room``; with O_DIRECT the read may run over ``stop``."""
    done = 0
    try:
        while start + done < stop:
            count = os.preadv(fd, [room[done:].data], start + done)
            if count == 0:
                _explain(shard, start + done, stop, 0)
            done += count
            if fd == shard.direct and count % _DIRECT_ALIGNMENT and start + done < stop:
                _explain(shard, start + done, stop, 0)  # only the file's end gives O_DIRECT an odd count
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} at byte {start + done:,}", str(shard.path)) from error


def _explain(shard: OpenShard, start: int, stop: int, problem: int) -> None:
    """Raise what a range that could not be brought in means."""
    size = os.fstat(shard.handle.fd).st_size
    if size < stop:
        raise DamageError(
            f"{shard.path}: the shard was cut off while it was open: expected {shard.handle.size:,} bytes, "
            f"found {size:,}; restore the file"
        )
    os.pread(shard.handle.fd, stop - start, start)  # tells the disk's error, where it is one
    raise OSError(problem or errno.EIO, f"bytes {start:,} to {stop:,} cannot be read", str(shard.path))
