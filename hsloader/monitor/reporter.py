"""Reporter: what one loader says while it runs.  It lives in the trainer, has no thread, and costs nothing when silent.

The loader calls it at the end of every ``next()`` and between the polls of a long wait; it decides whether a line is
due.  Nothing here ever talks to another process.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from hsloader.monitor.counters import TrainerCounter
from hsloader.monitor.header import Snapshot
from hsloader.monitor.limit import Limit, limit_of
from hsloader.monitor.lines import Opening, epoch_text, first_batch_text, heartbeat_text, opening_text
from hsloader.monitor.neighbours import Siblings, job_name
from hsloader.monitor.stall import StallReport
from hsloader.monitor.stats import flat_stats
from hsloader.monitor.voice import say
from hsloader.monitor.words import time_text

__all__ = ["Reporter"]

_FIRST_BEAT = 5.0  # seconds after an epoch began
_WINDOW = 10.0  # seconds that a window of stats() spans at least, once the loader runs so long


class Reporter:
    """Says lines by the rule of ``voice``.  One that does not ``speaks`` reports stalls only, as every rank does.

    ``read`` copies the ring's header; ``log_every`` seconds lie between two heartbeats (0: none).
    """

    def __init__(
        self,
        read: Callable[[], Snapshot],
        *,
        rank: int = 0,
        world: int = 1,
        worker: int = 0,
        workers: int = 1,
        speaks: bool = True,
        log_every: float = 30.0,
    ) -> None:
        self._read = read
        self._log_every = log_every
        self._speaks = speaks
        self._opened = time.monotonic()
        self._due = float("inf")
        self._first = True
        self._beat: Snapshot | None = None
        self._epoch: Snapshot | None = None
        self._windows: list[Snapshot] = []
        self._siblings = Siblings(job_name(), rank) if world > 1 and self._speaks and log_every else None
        # Of several DataLoader workers each tells only of its own share.
        self._part = f"worker {worker} of {workers}: " if workers > 1 else ""
        self._prefix = f"rank {rank}: {self._part}" if rank or world > 1 else self._part
        self._stall: StallReport | None = None
        self._stalled_at = 0.0  # instant at which the wait of the stall began
        self._limit: Limit | None = None

    def opened(self, opening: Opening) -> None:
        """The loader is there; reading begins."""
        if self._speaks:
            self.say(opening_text(opening))

    def say(self, text: str) -> None:
        """A line about this loader, which names the worker that it is of."""
        say(f"{self._part}{text}")

    def epoch_began(self) -> None:
        """An epoch (or the rest of one) begins; its counters are written."""
        self._epoch = self._beat = self._read()
        self._stall = None  # of an iteration that was left in the middle of it
        self._slowest()
        if self._log_every and self._speaks:
            self._due = time.monotonic() + min(_FIRST_BEAT, self._log_every)

    def batch_done(self) -> None:
        """A batch was handed out and counted.  Takes a microsecond unless something is due."""
        if self._first or self._stall is not None:
            self._after_wait()
        if time.monotonic() >= self._due:
            self._heartbeat()

    def stalled(self, seconds: float) -> None:
        """``next()`` has waited so long.  Called again as long as it waits, at intervals that the caller chooses."""
        if self._stall is None:
            self._stall, self._stalled_at = StallReport(), time.monotonic() - seconds
        try:
            text = self._stall.text(self._read(), seconds)
        except Exception as problem:  # a report that fails on an odd /proc must not end the training that it is about
            text = f"next() has waited {time_text(seconds)}; why could not be found out: {problem!r}"
        say(self._prefix + text, logging.WARNING)

    def epoch_ended(self) -> None:
        """The last batch of the epoch was handed out."""
        self._due = float("inf")
        if self._epoch is None:
            return
        start, self._epoch = self._epoch, None
        now = self._read()
        if self._speaks and now[TrainerCounter.BATCHES] > start[TrainerCounter.BATCHES]:
            self.say(epoch_text(start, now, start[TrainerCounter.EPOCH]))

    def stats(self) -> dict[str, float]:
        """The counters as a flat dict; see ``hsloader.monitor.stats`` for the names and units."""
        now = self._read()
        # The youngest snapshot that makes the window long enough; older ones are never needed again.
        old = [s for s in self._windows if now.at - s.at >= _WINDOW * 1e9][-1:]
        self._windows = [*old, *(s for s in self._windows if now.at - s.at < _WINDOW * 1e9)]
        if not self._windows or now.at - self._windows[-1].at >= 1e9:
            self._windows.append(now)
        return flat_stats(now, old[0] if old else None)

    def _after_wait(self) -> None:
        if self._first:
            self._first = False
            if self._speaks:
                self.say(first_batch_text(time.monotonic() - self._opened, self._read()))
        if self._stall is not None:
            self._stall = None
            waited = time_text(time.monotonic() - self._stalled_at)
            say(f"{self._prefix}the stall is over: the batch came after {waited}", logging.WARNING)

    def _heartbeat(self) -> None:
        now = self._read()
        self._due = time.monotonic() + self._log_every
        slowest = self._slowest()
        if self._beat is not None:
            verdict = limit_of(self._beat, now)
            # Advice is worth a line once, not every half minute.
            self.say(heartbeat_text(self._beat, now, verdict, slowest=slowest, advise=verdict.limit is not self._limit))
            self._limit = verdict.limit
        self._beat = now

    def _slowest(self) -> tuple[int, float, int] | None:
        if self._siblings is not None:
            with contextlib.suppress(OSError, ValueError):
                return self._siblings.slowest()
        return None
