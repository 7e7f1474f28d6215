"""Scratch space on the disk in question, which nothing survives: not an error, not ctrl-C, not a killed process.

Files have no name where the file system can do that (O_TMPFILE), so that the kernel frees them with the process.
Folders have a name and a locked owner file: they go when the context ends, and what a killed process left is removed
by the next one, which finds the lock free.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hsloader.benchmark.residency import drop

__all__ = ["ScratchFile", "ScratchFolder", "free_bytes", "scratch_place", "writable"]

_PREFIX = ".hsloader-bench-"
_YOUNG_SECONDS = 60.0  # a folder that is younger may not be locked yet
_BLOCK = 8 << 20


def writable(folder: Path) -> bool:
    """Whether files can be made in ``folder``."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def scratch_place(path: Path, *, beside: bool) -> Path | None:
    """A folder that can be written on the file system of ``path``: that itself or the folder around it.

    ``beside`` says which is tried first.  None if neither can; the folder around a mount is another disk.
    """
    path = path.resolve()
    places = (path.parent, path) if beside else (path, path.parent)
    device = path.stat().st_dev
    return next((place for place in places if writable(place) and place.stat().st_dev == device), None)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class ScratchFile:
    """A nameless file of random bytes. ``fd`` reads through the page cache, ``direct`` past it (or is -1)."""

    def __init__(self, folder: Path) -> None:
        self.size = 0
        self.direct = -1
        self.fd, name = _nameless(folder)
        try:
            with contextlib.suppress(OSError):
                self.direct = os.open(name or f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except BaseException:
            os.close(self.fd)
            raise
        finally:
            if name:
                Path(name).unlink()

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, which frees it."""
        for fd in (self.fd, self.direct):
            if fd >= 0:
                os.close(fd)
        self.fd = self.direct = -1

    def fill(self, size: int, seconds: float, progress: Callable[[int], None]) -> None:
        """Write random bytes until ``size`` or ``seconds`` are reached, make them durable and drop their pages.

        Random, because disks and file systems that compress or share equal blocks would lie otherwise.
        """
        rng = np.random.default_rng()
        until = time.monotonic() + seconds
        while self.size < size and time.monotonic() < until:
            block = rng.integers(0, 1 << 63, _BLOCK // 8, dtype=np.int64).view(np.uint8)
            written = os.pwrite(self.fd, block[: min(_BLOCK, size - self.size)].data, self.size)
            self.size += written
            if written < _BLOCK and self.size < size:
                break
            progress(self.size)
        os.fsync(self.fd)
        drop(self.fd)


def _nameless(folder: Path) -> tuple[int, str]:
    """A descriptor of a new file without a name; or with one, for the caller to remove."""
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), ""
    return tempfile.mkstemp(prefix=_PREFIX, dir=folder)


class ScratchFolder:
    """A folder in ``parent`` that is gone when the context ends; ``path`` is its place."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self.path = parent
        self._owner = -1

    def __enter__(self) -> ScratchFolder:
        remove_abandoned(self._parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
        try:
            self._owner = os.open(self.path / "owner", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # no locks here: then nobody else removes it either
                fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        self._remove()

    def _remove(self) -> None:
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1
        shutil.rmtree(self.path, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove folders whose process was killed: they are ours by name, not new, and nobody holds their lock.

    One without an owner file lost that to a process that was killed while it removed it.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                continue
            try:
                owner = os.open(folder / "owner", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
            finally:
                os.close(owner)
