"""Which way to read: mmap, pread or O_DIRECT, decided by the file system, the dataset's size and the memory.

* ``mmap`` (local file systems): decoders read the page cache in place, no copy. ``auto`` adds a bypass where it can:
  what is not in memory is read by O_DIRECT while decoding is what limits, and always if the dataset does not fit.
* ``pread`` (network file systems, FUSE, what is not known): a page fault that a server must answer can neither be
  timed out nor reported; a read can.
* ``direct``: the page cache is left alone. For datasets many times the memory, where its eviction costs more than the
  copy, if a short measurement on the dataset itself says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hsloader.monitor.words import size_text
from hsloader.reader.access import Buffer, Bypass
from hsloader.reader.limits import memory_total
from hsloader.reader.options import ReadOptions
from hsloader.store.manifest import MANIFEST_NAME

__all__ = ["ReadMode", "choose_mode", "file_system", "supports_direct"]

# The numbers statfs(2) gives, and whether the file system's data lie on this machine.
_MAGIC = {
    0xEF53: ("ext4", True),
    0x58465342: ("xfs", True),
    0x9123683E: ("btrfs", True),
    0x01021994: ("tmpfs", True),
    0x858458F6: ("ramfs", True),
    0x794C7630: ("overlay", True),
    0xF2F52010: ("f2fs", True),
    0x2FC12FC1: ("zfs", True),
    0xCA451A4E: ("bcachefs", True),
    0x73717368: ("squashfs", True),
    0xE0F5E1E2: ("erofs", True),
    0x6969: ("nfs", False),
    0x0BD00BD0: ("lustre", False),
    0x65735546: ("fuse", False),
    0xFF534D42: ("cifs", False),
    0xFE534D42: ("smb", False),
    0x00C36400: ("ceph", False),
    0x47504653: ("gpfs", False),
    0x19830326: ("beegfs", False),
    0x01021997: ("9p", False),
    0x6A656A63: ("virtiofs", False),
    0x5346414F: ("afs", False),
    0xAAD7AAEA: ("panfs", False),
    0x013111A8: ("ibrix", False),
}

_IN_MEMORY = ("tmpfs", "ramfs")
_MANY_TIMES = 4  # a dataset of so many times the memory is worth measuring O_DIRECT for
_FASTER = 1.1  # ... which must win by this factor
_PROBE_BYTES = 32 << 20
_PROBE_READ = 4 << 20


@dataclass(frozen=True, slots=True)
class ReadMode:
    """How to read, and why. ``local``: the data lie on this machine; ``reason``: a sentence for people.

    ``bypass``: when ranges of mapped files that are not in memory are read past the page cache.
    """

    mode: str
    drop_pages: bool
    file_system: str
    local: bool
    reason: str
    bypass: Bypass = "never"


def choose_mode(options: ReadOptions, root: Path, stored_bytes: int, find_shard: Callable[[], Path | None]) -> ReadMode:
    """Decide for the dataset at ``root`` of ``stored_bytes``; ``find_shard`` gives one of its larger files.

    ``ValueError`` where ``mode="direct"`` was asked for on a file system that refuses O_DIRECT.
    """
    name, local = file_system(root)
    memory = memory_total()
    drop = options.drop_pages
    fits = stored_bytes <= 0.8 * memory
    if drop is None:
        drop = not fits
    bypass: Bypass = "never"
    sizes = f"{size_text(stored_bytes)} of data, {size_text(memory)} of memory"
    mode: str = options.mode
    if mode == "auto":
        mode, reason = _decide(name, local, find_shard, stored_bytes, memory)
        wanted = mode == "mmap" and name not in _IN_MEMORY and not options.in_process
        if wanted and supports_direct(root / MANIFEST_NAME):
            bypass = "busy" if fits else "always"
            drop = bool(options.drop_pages)  # what is read past the page cache leaves nothing to drop
            when = "while decoding is what limits" if fits else "since it does not fit the memory"
            reason += f"; what is not in memory is read by O_DIRECT {when}"
    else:
        reason = "asked for"
    if mode == "mmap" and options.in_process:
        mode, reason = "pread", "in threads of this process; a truncated file under a map would kill it"
    if mode == "direct":
        shard = find_shard()
        if shard is not None and not supports_direct(shard):
            raise ValueError(f"mode='direct': {name} refuses O_DIRECT for {shard}; use mode='pread' or 'auto'")
        drop = False
    kept = "; pages are dropped once decoded" if drop else ""
    return ReadMode(mode, drop, name, local, f"{reason}; {name}, {sizes}{kept}", bypass)


def _decide(
    name: str, local: bool, find_shard: Callable[[], Path | None], stored_bytes: int, memory: int
) -> tuple[str, str]:
    if not local:
        return "pread", "not a local file system"
    shard = find_shard() if stored_bytes >= _MANY_TIMES * memory and name not in _IN_MEMORY else None
    if shard is None:
        return "mmap", "a local file system"
    if not supports_direct(shard):
        return "mmap", "a local file system without O_DIRECT"
    buffered, direct = _probe(shard, direct=False), _probe(shard, direct=True)
    rates = f"O_DIRECT {direct / 1e9:.2f} GB/s, through the page cache {buffered / 1e9:.2f}"
    return ("direct" if direct > _FASTER * buffered else "mmap"), f"measured: {rates}"


def file_system(path: Path | str) -> tuple[str, bool]:
    """The name of the file system at ``path``, and whether its data lie on this machine."""
    try:
        buffer = ctypes.create_string_buffer(512)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.statfs(os.fsencode(path), buffer) == 0:
            magic = ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF
            return _MAGIC.get(magic, (f"file system {magic:#x}", False))
    except (OSError, AttributeError):
        pass
    return "an unknown file system", False


def supports_direct(path: Path | str) -> bool:
    """Whether the file can be opened and read with O_DIRECT."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError:
        return False
    try:
        os.preadv(fd, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _probe(path: Path, *, direct: bool) -> float:
    """Bytes a second of reading the middle of ``path``; the two ways read parts that do not overlap."""
    flag = os.O_DIRECT if direct else 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    try:
        half = os.fstat(fd).st_size // 2
        begin = (half if direct else 0) // _PROBE_READ * _PROBE_READ
        count = max(1, min(_PROBE_BYTES, half) // _PROBE_READ)
        buffer = Buffer().take(_PROBE_READ)
        if not direct:
            os.posix_fadvise(fd, begin, count * _PROBE_READ, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        done = sum(os.preadv(fd, [buffer.data], begin + i * _PROBE_READ) for i in range(count))
        return done / max(1e-9, time.perf_counter() - started)
    finally:
        os.close(fd)
