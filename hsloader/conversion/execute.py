"""Runs the pending segments of a destination: in this process or in workers, listed in the order of the plans.

A finished segment is moved to its place at once, so a kill loses at most the segments under way; it is listed when all
before it are done, so that an interrupted and resumed run ends with the same bytes as an undisturbed one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hsloader._launch import LaunchUnavailableError
from hsloader.conversion.fp8 import source_row_bytes
from hsloader.conversion.journal import Journal, Settled
from hsloader.conversion.plan import Plan, PlannedSegment
from hsloader.conversion.planning import hints_of, layout_of
from hsloader.conversion.pool import WorkerPool
from hsloader.conversion.removal import SourceRemover
from hsloader.conversion.report import Progress, Quarantined
from hsloader.conversion.settings import ConvertSettings
from hsloader.conversion.slots import Slots
from hsloader.conversion.space import bytes_text, free_bytes, most_ahead
from hsloader.conversion.state import State, quarantined_in
from hsloader.conversion.task import SegmentResult, SegmentTask, TaskProgress, convert_segment
from hsloader.errors import ConversionError, DamageError
from hsloader.store.manifest import SegmentEntry
from hsloader.store.publish import Root, TemporaryDirectory
from hsloader.store.stored_segment import Segment

__all__ = ["Execution", "Totals"]

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_BACK_SHARE = 0.35  # of a segment's time, for the progress bar


@dataclass(slots=True)
class Totals:
    """What this run listed."""

    samples: int = 0
    segments: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0


@dataclass(slots=True)
class _Work:
    """A pending segment on its way: under way, placed, listed."""

    plan: Plan
    segment: PlannedSegment
    payload: int
    temporary: TemporaryDirectory | None = None
    release: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    result: SegmentResult | None = None
    entry: SegmentEntry | None = None
    finished: bool = False
    progress: TaskProgress = field(default_factory=TaskProgress)


class Execution:
    """One run over the pending segments of ``state``; the journal's lock is held by the caller."""

    def __init__(
        self,
        root: Root,
        journal: Journal,
        state: State,
        settings: ConvertSettings,
        *,
        progress: Callable[[Progress], None],
        removers: dict[int, SourceRemover],
    ) -> None:
        self._root = root
        self._journal = journal
        self._state = state
        self._settings = settings
        self._tell = progress
        self._removers = removers
        self.totals = Totals()
        self._queue = [
            _Work(plan, segment, sum(s.payload_bytes for s in segment.samples)) for plan, segment in state.pending()
        ]
        self._next = 0  # the first of the queue that is not listed yet
        self._begun = 0  # of the queue
        self._began = time.monotonic()
        self._payload = sum(work.payload for work in self._queue)
        self._reused = 0

    def run(self) -> Totals:
        """Convert and list everything that is pending. Errors leave a state that the same command resumes."""
        workers, threads = self._settings.parallelism(len(self._queue))
        try:
            with contextlib.ExitStack() as stack:
                for work in self._queue:
                    stack.push(work.release)
                if workers > 1:
                    try:
                        self._run_pool(workers, threads)
                    except LaunchUnavailableError:  # no interpreter to start a worker with: before the first task
                        workers, threads = 1, workers * threads
                if workers == 1:
                    self._run_here(threads)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise self._full(error) from error
        return self.totals

    def _run_here(self, threads: int) -> None:
        slots = Slots()
        for work in self._queue:
            if self._reuse(work):
                self._list_finished()
                continue

            def report(progress: TaskProgress, work: _Work = work) -> None:
                work.progress = progress
                self._say()

            self._finish(work, convert_segment(self._task(work, threads), report, slots))

    def _run_pool(self, workers: int, threads: int) -> None:
        waiting = iter(self._queue)
        self._begun = 0
        by_number = {work.segment.number: work for work in self._queue}
        with WorkerPool(workers) as pool:
            while True:
                while (
                    pool.has_room
                    and self._begun < self._next + most_ahead(workers)
                    and (work := self._next_task(waiting)) is not None
                ):
                    pool.submit(self._task(work, threads))
                if not pool.busy:
                    break
                for number, message in pool.messages():
                    work = by_number[number]
                    if isinstance(message, SegmentResult):
                        self._finish(work, message)
                    else:
                        work.progress = message
                        self._say()

    def _next_task(self, waiting: Iterator[_Work]) -> _Work | None:
        """The next segment that must be made; those that an earlier run left finished are taken over on the way."""
        for work in waiting:
            self._begun += 1
            if not self._reuse(work):
                return work
            self._list_finished()
        return None

    def _reuse(self, work: _Work) -> bool:
        """Take over the segment if an interrupted run has placed it, proved as this run would prove it."""
        number = work.segment.number
        try:
            placed = self._root.placed(number)
        except DamageError:
            placed = None
        if placed is None:
            if os.path.lexists(self._root.segment_path(number)):  # damaged since it was put there: made again
                self._root.discard(number)
            return False
        entry, meta = placed
        settled = self._state.settled.get(number)
        ours = (
            (meta.source or {}).items() >= _mark(work.segment).items()
            and settled is not None
            and settled.digest == entry.digest
        )
        if not ours or (self._settings.read_back and not (settled is not None and settled.read_back)):
            self._root.discard(number)
            return False
        work.entry, work.finished = entry, True
        self._reused += work.payload
        return True

    def _task(self, work: _Work, threads: int) -> SegmentTask:
        work.temporary = work.release.enter_context(self._root.temporary())
        settings, plan = self._settings, work.plan
        return SegmentTask(
            number=work.segment.number,
            directory=os.fspath(work.temporary.path),
            scratch=os.fspath(self._root.scratch),
            fields=plan.fields,
            layout=layout_of(plan.fields, plan.typical_length),
            bf16_as=settings.bf16_as,
            samples=work.segment.samples,
            hints=hints_of(settings),
            refused=work.segment.refused,
            source=_mark(work.segment),
            vocab_size=settings.vocab_size,
            trim_padding=settings.trim_padding,
            threads=threads,
            read_back=settings.read_back,
        )

    def _finish(self, work: _Work, result: SegmentResult) -> None:
        """A task is done: record it, move its segment to its place, list what can be listed."""
        work.result, work.finished = result, True
        number = work.segment.number
        if result.entry is None:
            settled = Settled(number, None, self._settings.read_back, tuple(result.quarantined))
            self._record(settled)
        else:
            assert work.temporary is not None
            self._record(Settled(number, result.entry.digest, self._settings.read_back))
            work.entry = self._root.place(work.temporary, number)
        self._list_finished()
        self._say()

    def _record(self, settled: Settled) -> None:
        self._journal.settle(settled)
        self._state.settled[settled.number] = settled

    def _list_finished(self) -> None:
        """List the finished segments that have nothing unfinished before them, and let their sources go."""
        ready = []
        while self._next < len(self._queue) and self._queue[self._next].finished:
            ready.append(self._queue[self._next])
            self._next += 1
        for work in ready:
            if work.entry is not None:
                self._state.manifest = self._root.append_segments(
                    [work.entry], work.plan.fields, work.plan.provenance, allow_unknown=self._settings.allow_unknown
                )
                self._state.listed[work.segment.number] = work.entry
                self._count(work.plan, work.entry)
            work.release.close()
            reasons = self._reasons(work)
            self._state.count(work.segment, reasons)
            remover = self._removers.get(id(work.plan))
            if remover is not None:
                proved = work.entry is None or self._state.proved(work.segment.number)
                remover.listed(work.segment, [q.name for q in reasons], proved)

    def _reasons(self, work: _Work) -> list[Quarantined]:
        if work.result is not None:
            return work.result.quarantined
        assert work.entry is not None
        return quarantined_in(Segment(self._root.path, work.entry))

    def _count(self, plan: Plan, entry: SegmentEntry) -> None:
        totals = self.totals
        totals.segments += 1
        totals.samples += entry.samples
        totals.tokens += entry.tokens
        totals.raw_bytes += entry.tokens * source_row_bytes(plan.fields)
        totals.stored_bytes += entry.stored_bytes

    def _say(self) -> None:
        done = samples = quarantined = 0
        for work in self._queue:
            if work.finished:
                done += work.payload if work.result is not None else 0
                if work.result is not None:
                    samples += work.result.entry.samples if work.result.entry is not None else 0
                    quarantined += len(work.result.quarantined)
                continue
            now = work.progress
            share = _READ_BACK_SHARE if self._settings.read_back else 0.0
            done += int(now.converted * (1 - share) + min(now.read_back, now.converted) * share)
            samples += now.samples
            quarantined += now.quarantined
        seconds = time.monotonic() - self._began
        rate = done / seconds if seconds > 0 else 0.0
        total = self._payload - self._reused
        self._tell(
            Progress(
                stage="convert",
                done=done,
                total=total,
                samples=samples,
                quarantined=quarantined,
                segments=self._next,
                seconds=seconds,
                rate=rate,
                seconds_left=(total - done) / rate if rate > 0 else None,
            )
        )

    def _full(self, error: OSError) -> ConversionError:
        """The error for a disk that is full, with what is there, what is missing and what is safe."""
        left = sum(work.payload for work in self._queue if not self._state.done(work.segment.number))
        ratio = self.totals.raw_bytes / self.totals.stored_bytes if self.totals.stored_bytes else 1.4
        return ConversionError(
            f"{error.filename or self._root.path}: {error.strerror}: {bytes_text(free_bytes(self._root.path))} are "
            f"free at {self._root.path}, about {bytes_text(left / ratio)} more are needed. {self.totals.segments} of "
            f"{len(self._queue)} segments of this run are listed ({self.totals.samples:,} samples) and stay. Make room "
            "and run the same command again: it goes on from there"
        )


def _mark(segment: PlannedSegment) -> dict[str, Any]:
    """What a segment's metadata says of its plan: a resumed run recognises its own work by it."""
    return {"plan": segment.digest()}
