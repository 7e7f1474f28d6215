"""Reading another process's /proc: what is refused is remembered with its reason, what hangs is given up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

__all__ = ["ProcAccess", "processes", "within"]

T = TypeVar("T")
D = TypeVar("D")

_PATIENCE = 0.5  # seconds for a call that may hang: a dead file server, a process whose memory map is locked


def within(seconds: float, function: Callable[[], T], default: D) -> T | D:
    """Call ``function`` in a thread of its own and give up after ``seconds``, leaving the thread behind (a daemon)."""
    result: list[T | D] = []

    def call() -> None:
        try:
            result.append(function())
        except OSError:
            result.append(default)

    thread = threading.Thread(target=call, name="hsloader-look", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else default


class ProcAccess:
    """Reads files below ``/proc`` for one examination.

    A file that is gone reads as None.  One that is refused reads as None too and is listed in ``refused``:
    kind of file -> ids of processes.  One that hangs (reading a command line takes the process's memory-map lock,
    which a stuck page fault can hold) is given up after half a second and the process is not asked again:
    ``locked`` lists it.
    """

    def __init__(self) -> None:
        self.refused: dict[str, set[int]] = {}
        self.locked: set[int] = set()
        self.silent_mounts: set[int] = set()

    def text(self, pid: int, name: str, tid: int | None = None) -> str | None:
        """The text of ``/proc/PID/NAME``, or of the thread's own file of that name."""
        path = f"/proc/{pid}/{name}" if tid is None else f"/proc/{pid}/task/{tid}/{name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            self.refused.setdefault(name, set()).add(pid)
            return None
        except OSError:
            return None
        try:
            parts = []
            while part := os.read(fd, 1 << 16):
                parts.append(part)
        except PermissionError:
            self.refused.setdefault(name, set()).add(pid)
            return None
        except OSError:
            return None
        finally:
            os.close(fd)
        return b"".join(parts).decode("utf-8", "surrogateescape")

    def memory_text(self, pid: int, name: str, patience: float = _PATIENCE) -> str | None:
        """As ``text`` for files that need the process's memory map: cmdline, environ, maps, smaps, smaps_rollup."""
        if pid in self.locked:
            return None
        answer = within(patience, lambda: (self.text(pid, name),), None)
        if answer is None:
            self.locked.add(pid)
            return None
        return answer[0]

    def memory(self, pid: int, address: int, count: int) -> bytes:
        """Bytes of the process's memory (arguments of a system call); empty where that is refused."""
        if pid in self.locked or not address:
            return b""

        def read() -> bytes:
            fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(fd, count, address)
            finally:
                os.close(fd)

        return within(_PATIENCE, read, b"")

    def text_at(self, pid: int, address: int) -> str | None:
        """A path among the arguments of a system call."""
        # A read may not cross into a page that is not mapped, so it ends with the page.
        whole = self.memory(pid, address, 4096 - address % 4096)
        if b"\0" not in whole:
            whole += self.memory(pid, address + len(whole), 4096)
        raw = whole.partition(b"\0")[0]
        return os.fsdecode(raw) if raw and b"\0" in whole else None

    def links(self, pid: int) -> dict[int, str]:
        """What each open descriptor leads to, as ``/proc/PID/fd`` shows it."""
        folder = f"/proc/{pid}/fd"
        links: dict[int, str] = {}
        try:
            names = os.listdir(folder)
        except PermissionError:
            self.refused.setdefault("fd", set()).add(pid)
            return links
        except OSError:
            return links
        for name in names:
            try:
                links[int(name)] = os.readlink(f"{folder}/{name}")
            except OSError:
                continue
        return links

    def stat_open_file(self, pid: int, fd: int, mount: int, remote: bool) -> os.stat_result | None:
        """The status of what a descriptor leads to; a mount that did not answer once is not asked again."""
        if mount in self.silent_mounts:
            return None
        path = f"/proc/{pid}/fd/{fd}"
        if not remote:
            try:
                return Path(path).stat()
            except OSError:
                return None
        answered = False

        def ask() -> os.stat_result | None:
            nonlocal answered
            try:
                return Path(path).stat()
            finally:
                answered = True

        status = within(_PATIENCE, ask, None)
        if not answered:
            self.silent_mounts.add(mount)
        return status


def processes() -> Iterator[int]:
    """Ids of all processes that /proc shows us."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)
