"""Reading another process's /proc: what is refused is remembered with its reason, what hangs is given up."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

__all__ = ["Patience", "ProcAccess", "processes", "system_text"]

T = TypeVar("T")
D = TypeVar("D")
_Job = tuple[Callable[[], Any], "SimpleQueue[tuple[list[Any], float]]"]

_PATIENCE = 0.5  # seconds for a call that may hang: a dead file server, a process whose memory map is locked


class Patience:
    """Makes calls that may hang in a thread beside, and gives one up after a while.

    The thread (a daemon) is kept from call to call, since many are made; one that hangs is left behind, and the next
    call starts another.  ``close`` ends it.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] | None = None
        self.spent = 0.0
        """CPU seconds of calls that came back."""

    def ask(self, seconds: float, function: Callable[[], T], default: D) -> T | D:
        """What ``function`` returns, or ``default``: it was refused (``OSError``) or took longer than ``seconds``."""
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs,), name="hsloader-look", daemon=True).start()
        answers: SimpleQueue[tuple[list[Any], float]] = SimpleQueue()
        self._jobs.put((function, answers))
        try:
            found, spent = answers.get(timeout=seconds)
        except Empty:
            self.close()
            return default
        self.spent += spent
        return found[0] if found else default

    def close(self) -> None:
        """Have the thread end, as soon as it can."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        function, answers = job
        found: list[Any] = []
        began = time.thread_time()
        with contextlib.suppress(OSError, OverflowError):  # an address that no file offset can be
            found.append(function())
        answers.put((found, time.thread_time() - began))


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
        self.patience = Patience()

    def close(self) -> None:
        """End the thread that patient calls are made in."""
        self.patience.close()

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
        """As ``text`` for files that need the process's memory map: cmdline, environ, maps, smaps, smaps_rollup.

        The last two walk all pages of the process: one that takes long is slow, and says nothing about a lock.
        """
        if pid in self.locked:
            return None
        answer = self.patience.ask(patience, lambda: (self.text(pid, name),), None)
        if answer is None:
            if not name.startswith("smaps"):
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

        return self.patience.ask(_PATIENCE, read, b"")

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

    def link(self, pid: int, fd: int) -> str | None:
        """What one descriptor leads to; None if it is closed or hidden."""
        try:
            return os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            return None

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

        status = self.patience.ask(_PATIENCE, ask, None)
        if not answered:
            self.silent_mounts.add(mount)
        return status


def system_text(path: str) -> str:
    """The text of a file of the whole system below /proc or /sys; empty where there is none or it is refused."""
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""


def processes() -> Iterator[int]:
    """Ids of all processes that /proc shows us."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)
