"""Worker processes that convert segments: started as needed, given one task at a time, ended with the run."""

from __future__ import annotations

import select
from collections.abc import Iterator
from types import TracebackType

from hsloader._launch import Child, launch
from hsloader.conversion.task import SegmentResult, SegmentTask, TaskProgress
from hsloader.conversion.worker import ENTRY, Hangup, receive, send
from hsloader.errors import ConversionError

__all__ = ["WorkerPool"]


class WorkerPool:
    """At most ``size`` workers. A context manager: leaving it ends them, whatever they do."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._idle: list[Child] = []
        self._busy: dict[Child, SegmentTask] = {}
        self._started = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        workers = [*self._idle, *self._busy]
        self._idle, self._busy = [], {}
        for child in workers:  # all are told first, so that they leave at the same time
            child.channel.close()
        for child in workers:
            child.close()

    @property
    def has_room(self) -> bool:
        """Whether another task would be begun at once."""
        return len(self._busy) < self._size

    @property
    def busy(self) -> int:
        """Tasks under way."""
        return len(self._busy)

    def submit(self, task: SegmentTask) -> None:
        """Give a task to an idle worker, or to a new one."""
        child = self._idle.pop() if self._idle else self._start()
        self._busy[child] = task
        try:
            send(child.channel, task)
        except Hangup:
            raise self._died(child) from None

    def messages(self) -> Iterator[tuple[int, TaskProgress | SegmentResult]]:
        """Wait until workers have something to say: the segment's number, and its progress or result.

        Raises what a task raised, and ``ConversionError`` if a worker died.
        """
        poller = select.poll()
        by_fd = {child.channel.fileno(): child for child in self._busy}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll():
            child = by_fd[fd]
            try:
                message = receive(child.channel)
            except Hangup:
                raise self._died(child) from None
            number = self._busy[child].number
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, SegmentResult):
                del self._busy[child]
                self._idle.append(child)
            yield number, message

    def _start(self) -> Child:
        self._started += 1
        return launch(ENTRY, name=f"conversion worker {self._started}")

    def _died(self, child: Child) -> ConversionError:
        number = self._busy[child].number
        child.wait(2.0)
        return ConversionError(
            f"{child.ending()}\nIt was writing segment {number}. What is listed is safe; run the same command again to "
            "go on, with fewer workers if memory was short"
        )
