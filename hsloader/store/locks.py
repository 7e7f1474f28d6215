"""Locks of a dataset: flock on files that stay where they are, plus a lock between the threads of this process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hsloader.errors import StoreBusyError

__all__ = ["exclusive", "flock_file", "try_flock"]

_NO_FLOCK = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05


class _Held:
    """This process's hold on one lock file: threads queue at ``thread``, the first in opens and flocks the file."""

    def __init__(self) -> None:
        self.thread = threading.RLock()
        self.depth = 0
        self.fd = -1


_held: dict[str, _Held] = {}


@contextlib.contextmanager
def exclusive(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file ``path`` (made if need be; never renamed or deleted). One thread may nest it.

    Raises ``StoreBusyError`` after ``timeout`` seconds, or at once where the file system has no flock.
    """
    held = _held.setdefault(os.path.realpath(path), _Held())
    if not held.thread.acquire(timeout=timeout):
        raise StoreBusyError(f"{path}: another thread of this process has held the lock for {timeout:g} s")
    try:
        if held.depth == 0:
            held.fd = flock_file(path, timeout)
        held.depth += 1
        try:
            yield
        finally:
            held.depth -= 1
            if held.depth == 0:
                fd, held.fd = held.fd, -1
                release(fd)
    finally:
        held.thread.release()


def flock_file(path: Path, timeout: float) -> int:
    """A descriptor on ``path`` that holds its exclusive flock; ``release`` gives it back."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while not try_flock(fd, path):
            if time.monotonic() >= deadline:
                raise StoreBusyError(
                    f"{path}: somebody else has held this lock for {timeout:g} s; expected milliseconds. "
                    f"Find the process with: fuser -v {path}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def try_flock(fd: int, path: Path) -> bool:
    """Take the exclusive flock of an open file if it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            raise StoreBusyError(
                f"{path}: this file system refuses flock ({error.strerror}), and without it writers would lose each "
                "other's segments; mount it with flock (Lustre: -o flock), or write to a local disk and copy"
            ) from error
        raise
    return True


def release(fd: int) -> None:
    """Unlock and close. The unlock is explicit: a forked child may still hold a copy of the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _forget_in_child() -> None:
    # The parent's holds are the parent's: only close our copies (no unlock, which would reach the parent's lock).
    for held in _held.values():
        if held.fd >= 0:
            os.close(held.fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
