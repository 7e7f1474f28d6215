"""Helpers: further processes of one feeder.

Threads of one Python process wait for its global lock. Frames of 2.7 MB hide that up to about eight threads (measured
on 16 cores: 8 threads 7.7 of 8.7 GB/s, 15 threads 8.3 of 15.6); on frames of 0.4 MB two threads lose a tenth already.
So a feeder with several decoders forks once, before it has threads: each helper runs an engine of its own on the same
ring, for its share of the requests. They live and die together: the trainer sees one feeder.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from hsloader._launch import Parent
from hsloader.reader.counters import FeederCounter
from hsloader.reader.engine import Engine, EngineSettings
from hsloader.reader.ring import Ring
from hsloader.reader.serving import listen

__all__ = ["Helpers"]

_HELPERS = int(FeederCounter.HELPERS)
_PR_SET_PDEATHSIG = 1
_LAST_WAIT = 0.3  # seconds for killed helpers to be gone; one that hangs in the kernel is left to it


class Helpers:
    """The helpers as the feeder's first process sees them; made before it has threads."""

    def __init__(self, ring: Ring, parent: Parent, settings: EngineSettings) -> None:
        self.sockets: list[socket.socket] = []
        self._pids: list[int] = []
        ring.feeder[FeederCounter.PID] = os.getpid()
        for part in range(1, settings.engines):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            pid = os.fork()
            if not pid:
                for inherited in (ours, *self.sockets):
                    inherited.close()
                _be_a_helper(ring, parent, settings, bell=theirs, part=part)
            theirs.close()
            ours.setblocking(False)
            self.sockets.append(ours)
            self._pids.append(pid)
            ring.feeder[_HELPERS + part - 1] = pid

    def wake(self) -> None:
        """See ``Crew``."""
        for bell in self.sockets:
            with contextlib.suppress(OSError):
                bell.send(b"\0")

    def listen(self) -> None:
        """See ``Crew``."""
        for pid, bell in zip(self._pids, self.sockets, strict=True):
            alive, _ = listen(bell)
            if not alive:
                self._die_like(pid)

    def end(self) -> None:
        """Kill them and take their statuses, so that none is left to a process that does not expect it."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _LAST_WAIT
        for pid in self._pids:
            while time.monotonic() < deadline and not _status(pid)[0]:
                time.sleep(0.001)

    def _die_like(self, pid: int) -> None:
        """A helper ended: end in the same way, so that the trainer learns how."""
        deadline = time.monotonic() + 5.0
        gone, status = _status(pid)
        while not gone and time.monotonic() < deadline:
            time.sleep(0.001)
            gone, status = _status(pid)
        self._pids.remove(pid)
        self.end()
        if gone and os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            sys.stderr.write(f"helper process {pid} was killed by signal {number}\n")
            sys.stderr.flush()
            faulthandler.disable()
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
            os.kill(os.getpid(), number)
        os._exit(os.waitstatus_to_exitcode(status) if gone and os.WIFEXITED(status) else 70)


def _be_a_helper(ring: Ring, parent: Parent, settings: EngineSettings, *, bell: socket.socket, part: int) -> NoReturn:
    """What a forked process does; it never returns into the code of the one it was forked from."""
    status = 70
    try:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == ring.feeder[FeederCounter.PID]:
            _help(ring, parent, settings, bell, part)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _help(ring: Ring, parent: Parent, settings: EngineSettings, bell: socket.socket, part: int) -> None:
    """Serve until the feeder's first process or the trainer ends."""
    bell.setblocking(False)
    parent.channel.setblocking(False)
    engine = Engine(ring, settings, parent.channel, part)
    engine.start()
    poller = select.poll()
    poller.register(bell, select.POLLIN)
    if parent.pidfd is not None:
        poller.register(parent.pidfd, select.POLLIN)
    engine.look()
    while True:
        poller.poll(1000)
        alive, _ = listen(bell)
        if not alive or (parent.pidfd is not None and parent.gone()):
            return
        engine.look()


def _status(pid: int) -> tuple[bool, int]:
    """Whether a child has ended (it is then gone for good), and its status."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True, 0
    return found != 0, status
