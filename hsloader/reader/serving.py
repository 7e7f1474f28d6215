"""Waiting for requests: what the feeder's main thread does, and that of its helpers and of a reader in threads."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from hsloader.monitor.header import take_snapshot
from hsloader.reader.counters import TrainerCounter
from hsloader.reader.engine import Engine
from hsloader.reader.ring import Ring

__all__ = ["Crew", "NoCrew", "listen", "serve"]

Say = Callable[[str], None]

_TICK = 1000  # milliseconds: without pidfds the trainer is looked for so often, and so is whatever rang no bell


class Crew(Protocol):
    """The processes that share the feeder's work."""

    @property
    def sockets(self) -> list[socket.socket]:
        """What they hold as long as they live."""

    def wake(self) -> None:
        """Have them look at the requests."""

    def listen(self) -> None:
        """Ends this process if one of them has ended."""


class NoCrew:
    """A feeder that works alone."""

    sockets: list[socket.socket] = []  # noqa: RUF012 - never changed

    def wake(self) -> None:
        """See ``Crew``."""

    def listen(self) -> None:
        """See ``Crew``."""


def serve(
    engine: Engine,
    channel: socket.socket,
    crew: Crew,
    *,
    parent_fd: int | None = None,
    parent_gone: Callable[[], bool] = lambda: False,
    say: Say = lambda line: None,
) -> None:
    """Take requests until the channel hangs up or the trainer ends. ``say`` gets the lines for people."""
    channel.setblocking(False)
    poller = select.poll()
    for item in (channel, *crew.sockets):
        poller.register(item, select.POLLIN)
    if parent_fd is not None:
        poller.register(parent_fd, select.POLLIN)
    idle = Idle(engine.settings.idle_after, say)
    with _metrics(engine, say):
        crew.wake()
        engine.look()
        while True:
            events = poller.poll(_TICK)
            alive, heard = listen(channel)
            if parent_gone() or not alive:
                return
            crew.listen()
            if heard:
                crew.wake()
            if heard or not events:
                engine.look()
                idle.look(engine.ring)


def listen(channel: socket.socket) -> tuple[bool, bool]:
    """Empty a channel: whether the other end is there, and whether it had rung."""
    heard = False
    try:
        while True:
            if not channel.recv(4096):
                return False, heard
            heard = True
    except BlockingIOError:
        return True, heard
    except OSError:
        return False, heard


class Idle:
    """Says once, and then ever more seldom, that batches are ready and nobody has asked for one."""

    def __init__(self, after: float, say: Say) -> None:
        self._after = after
        self._say = say
        self._call = 0
        self._next = after

    def look(self, ring: Ring) -> None:
        """To be called about every second."""
        call = int(ring.trainer[TrainerCounter.LAST_CALL])
        if call != self._call:
            self._call, self._next = call, self._after
            return
        quiet = (time.monotonic_ns() - call) / 1e9
        if not call or quiet < self._next or ring.trainer[TrainerCounter.WAITING_SINCE]:
            return
        ready = take_snapshot(ring.fd, ring.shape).ready
        self._next *= 5
        if ready > 0:
            self._say(f"hsloader: the trainer has not asked for a batch for {quiet:.0f} s; {ready} are ready\n")


@contextlib.contextmanager
def _metrics(engine: Engine, say: Say) -> Iterator[None]:
    """Serve the counters to Prometheus meanwhile, if asked; a port that cannot be had is no reason to stop."""
    port, ring = engine.settings.metrics_port, engine.ring
    if not port:
        yield
        return
    from hsloader.monitor.prometheus import MetricsServer

    try:
        server = MetricsServer(port, lambda: take_snapshot(ring.fd, ring.shape))
    except OSError as error:
        say(f"hsloader: no metrics on port {port}: {error.strerror or error}\n")
        yield
        return
    try:
        yield
    finally:
        server.close()
