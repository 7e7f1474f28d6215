"""Temporary directories and the locks that say whose they are: the living keep theirs, the dead's are cleaned."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

from hsloader.errors import DamageError
from hsloader.store.checks import parse_json
from hsloader.store.locks import flock_file, release, try_flock

__all__ = ["TemporaryDirectory", "clean_owner", "remove_tree"]

_NOTE_LIMIT = 4096
_OWN_LOCK_TIMEOUT = 10.0


class TemporaryDirectory:
    """A new directory in ``scratch``, at ``path``; other processes leave it alone as long as its lock is held.

    The lock is that of a file ``NAME.owner`` beside it, which exists before the directory and goes after it. Made under
    the dataset's lock, so that nobody cleans between the file's making and its locking.
    """

    def __init__(self, scratch: Path) -> None:
        name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self.path = scratch / name
        self._owner = scratch / f"{name}.owner"
        self._process = os.getpid()
        self._owner_fd = flock_file(self._owner, _OWN_LOCK_TIMEOUT)
        try:
            self._note({})
            self.path.mkdir()
        except BaseException:
            self.close()
            raise

    def note_segment(self, number: int) -> None:
        """Note durably that segment ``number`` is ours too, before the directory appears under that name."""
        self._note({"segment": number})
        os.fsync(self._owner_fd)

    def close(self) -> None:
        """Delete what is left of the directory, and give up ownership."""
        if self._owner_fd < 0 or os.getpid() != self._process:  # a forked child owns nothing of its parent's
            return
        fd, self._owner_fd = self._owner_fd, -1
        shutil.rmtree(self.path, ignore_errors=True)
        self._owner.unlink(missing_ok=True)
        release(fd)

    def _note(self, values: dict[str, int]) -> None:
        os.pwrite(self._owner_fd, json.dumps({"host": socket.gethostname(), **values}).encode() + b"\n", 0)


def clean_owner(
    owner: Path, segment_path: Callable[[int], Path], may_go: Callable[[int], bool], older_than: float | None
) -> list[Path]:
    """Delete what the owner of the file ``owner`` left, if it is dead; the dataset's lock is held.

    That is its directory, and the segment that it noted if ``may_go`` agrees. An owner on another host counts as alive
    unless its file is older than ``older_than`` seconds. Returns what was deleted.
    """
    try:
        fd = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # it ended just now, and took its things along
        return []
    try:
        if not try_flock(fd, owner):
            return []
        host, number = _read_note(fd, owner)
        old = older_than is not None and time.time() - os.fstat(fd).st_mtime > older_than
        if host != socket.gethostname() and not old:
            return []
        paths = [owner.with_suffix("")]
        if number is not None and may_go(number):
            paths.append(segment_path(number))
        removed = [path for path in paths if path.exists()]
        for path in removed:
            remove_tree(path, owner.parent)
        owner.unlink(missing_ok=True)
        return [*removed, owner]
    finally:
        release(fd)


def remove_tree(path: Path, scratch: Path) -> None:
    """Delete a directory so that a kill in the middle leaves no half of it under its name."""
    gone = scratch / f"gone-{secrets.token_hex(6)}"
    path.rename(gone)
    shutil.rmtree(gone)


def _read_note(fd: int, owner: Path) -> tuple[str | None, int | None]:
    data = os.pread(fd, _NOTE_LIMIT, 0)
    if not data.strip():
        # Killed before its first note: it has made nothing else yet, so there is nothing to lose.
        return socket.gethostname(), None
    try:
        note = parse_json(data, owner).value
    except DamageError:
        return None, None
    host, number = note.get("host"), note.get("segment")
    return (host if isinstance(host, str) else None), (number if isinstance(number, int) else None)
