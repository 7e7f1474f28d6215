"""Small file operations that must be durable: write, fsync, rename, and reads with a limit."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from hsloader.errors import DamageError

__all__ = ["OUT_OF_RESOURCES", "fsync_directory", "open_regular", "read_limited", "replace_file", "write_new"]

_NO_DIRECTORY_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})

# Errors that say nothing about the file: they are not damage.
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def fsync_directory(path: Path | str) -> None:
    """Make the directory's entries durable; file systems that cannot (EINVAL, ENOTSUP) count as done."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(fd)


def write_new(path: Path, data: bytes | memoryview) -> None:
    """Write a file that must not exist yet, and fsync it (its directory is the caller's to fsync)."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, *, scratch: Path) -> None:
    """Put ``data`` at ``path`` atomically and durably, by way of a file ``*.swap`` in the directory ``scratch``.

    In a dataset's own scratch only under the dataset's lock: whoever holds it may delete such files.
    """
    temporary = scratch / f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}.swap"
    try:
        write_new(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


_REMEDY = ": restore it from a copy, or convert its samples again into another dataset"


def open_regular(path: Path, size: int | None, what: str) -> int:
    """A descriptor for reading the regular file ``path``; ``DamageError`` if it is missing or not ``size`` bytes."""
    expected = "expected a file" if size is None else f"expected a file of {size:,} bytes"
    try:
        # O_NONBLOCK: a pipe in the place of a file must not hang the open.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            raise
        raise DamageError(f"{path}: {what} cannot be opened: {error.strerror}; {expected}{_REMEDY}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise DamageError(f"{path}: {what} is not a regular file; {expected}{_REMEDY}")
    if size is not None and status.st_size != size:
        os.close(fd)
        raise DamageError(f"{path}: {what} has {status.st_size:,} bytes; {expected}{_REMEDY}")
    return fd


def read_limited(path: Path, limit: int, what: str, *, size: int | None = None) -> bytes:
    """The whole of a small file, refused above ``limit`` bytes or, where ``size`` is known, at any other size."""
    fd = open_regular(path, size, what)
    try:
        found = os.fstat(fd).st_size
        if found > limit:
            raise DamageError(f"{path}: {what} has {found:,} bytes; expected at most {limit:,}")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(found + 1)
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            raise
        raise DamageError(f"{path}: {what} cannot be read: {error.strerror}; restore the file") from error
    finally:
        os.close(fd)
    if len(data) != found:
        raise DamageError(f"{path}: {what} changed while it was read ({found:,} bytes, then {len(data):,})")
    return data
