"""Whether a producer holds the lock file beside a sample right now: then the sample is still being written."""

from __future__ import annotations

import fcntl
import os

from hsloader.errors import SourceError
from hsloader.formats.discover import FoundFile

__all__ = ["demand_not_held"]


def demand_not_held(file: FoundFile) -> None:
    """``SourceError`` if the file has a lock file and somebody holds it."""
    if file.lock and _is_held(f"{file.path}.lock"):
        raise SourceError(file.name, "being written: its producer holds the lock file")


def _is_held(lock: str) -> bool:
    """Whether somebody holds the lock file; it is opened for reading and left as it is."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)
    return False
