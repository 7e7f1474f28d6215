"""Where an engine runs, as the client sees it: in a feeder process, or in threads of this process."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from hsloader._launch import launch
from hsloader.reader.counters import FeederCounter
from hsloader.reader.engine import MOST_ENGINES, Engine, EngineSettings
from hsloader.reader.ring import Ring
from hsloader.reader.serving import NoCrew, serve

__all__ = ["Host", "ProcessHost", "ThreadHost"]

ENTRY = "hsloader.reader.boot:main"

# numpy's OpenBLAS would start a thread a core in a process that never multiplies.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": ""}

_HELPERS = int(FeederCounter.HELPERS)

_STUCK = 1.0  # seconds after which a process that ended but is not gone counts as stuck
_GRACE = 0.5  # seconds that a feeder has to leave by itself; a stopped one never does


class Host(Protocol):
    """A running engine."""

    channel: socket.socket
    death_fd: int | None
    pid: int

    def alive(self) -> bool:
        """Whether it still runs."""

    def stuck(self) -> bool:
        """Whether it died but threads of it are left in the kernel, which may yet write into the ring."""

    def remains(self) -> bool:
        """Whether, of one that died, helpers are left after a moment; they may yet write into the ring."""

    def epitaph(self) -> str:
        """How it ended, in words."""

    def close(self) -> None:
        """End it and free what it holds; in a forked child only close the descriptors. Safe to call again."""


class ProcessHost:
    """A feeder process."""

    def __init__(self, ring: Ring, settings: EngineSettings) -> None:
        fds = {"ring": ring.fd}
        stderr = -1
        with contextlib.suppress(OSError):
            stderr = fds["stderr"] = os.dup(2)  # 2 itself is the child's log
        try:
            self._child = launch(ENTRY, args=asdict(settings), fds=fds, name="feeder", environment=_ENVIRONMENT)
        finally:
            if stderr >= 0:
                os.close(stderr)
        self.channel = self._child.channel
        self.channel.setblocking(False)
        self.death_fd = self._child.pidfd
        self.pid = self._child.pid
        self._ring = ring
        self._words = ""
        self._zombie_since = 0.0
        self._stuck = False

    def alive(self) -> bool:
        """See ``Host``."""
        return not self._words and self._child.poll() is None

    def stuck(self) -> bool:
        """See ``Host``."""
        if self._stuck:  # for good, also when a close() was interrupted
            return True
        if not self.alive() or _state(self.pid) != "Z":
            self._zombie_since = 0.0
            return False
        # An ending process is a zombie until its last thread is gone and it is asked for: only what stays one is stuck.
        now = time.monotonic()
        self._zombie_since = self._zombie_since or now
        self._stuck = now - self._zombie_since > _STUCK
        return self._stuck

    def remains(self) -> bool:
        """See ``Host``."""
        helpers = [int(pid) for pid in self._ring.feeder[_HELPERS : _HELPERS + MOST_ENGINES - 1] if pid]
        deadline = time.monotonic() + _STUCK
        while any(_name(pid) == "hsl-feeder" and _state(pid) not in "ZX" for pid in helpers):
            if time.monotonic() > deadline:
                return True
            time.sleep(0.001)
        self._ring.feeder[_HELPERS : _HELPERS + MOST_ENGINES - 1] = 0
        return False

    def epitaph(self) -> str:
        """See ``Host``."""
        return self._words or self._child.ending()

    def close(self) -> None:
        """See ``Host``."""
        if not self._words:
            self._words = self._child.ending()
        self._child.close(_GRACE)


class ThreadHost:
    """An engine in threads of this process: no second process, but its threads share the trainer's GIL."""

    def __init__(self, ring: Ring, settings: EngineSettings) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel.setblocking(False)
        self.death_fd: int | None = None
        self.pid = os.getpid()
        self._closed = False
        self._theirs = theirs
        self._engine = Engine(ring, settings, theirs)
        self._engine.start()
        arguments = (self._engine, theirs, NoCrew())
        self._thread = threading.Thread(target=serve, args=arguments, name="hsl-engine", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """See ``Host``."""
        return not self._closed

    def stuck(self) -> bool:
        """See ``Host``."""
        return False

    def remains(self) -> bool:
        """See ``Host``."""
        return False

    def epitaph(self) -> str:
        """See ``Host``."""
        return "the reader's threads ended"

    def close(self) -> None:
        """See ``Host``."""
        if self._closed:
            return
        self._closed = True
        self.channel.close()
        if os.getpid() == self.pid:
            self._thread.join(5.0)
            self._engine.stop()
        self._theirs.close()


def _name(pid: int) -> str:
    """The name that a process gave itself; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _state(pid: int) -> str:
    """The state letter of a process's first thread."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def wait_readable(fds: list[int], timeout: float | None) -> None:
    """Wait until one of ``fds`` is readable or hung up, or ``timeout`` seconds are over."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(None if timeout is None else max(0.0, timeout) * 1000)
