"""Runs work in threads for a bounded time, and counts the processor time of processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Deadline", "Timed", "process_cpu", "run_threads"]


class Deadline:
    """Time that is left of a run, shared out among its parts."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def share(self, seconds: float, parts: int = 1) -> float:
        """Seconds for one of ``parts`` equal pieces of work that wants ``seconds`` each."""
        return max(0.02, min(seconds, self.left / max(1, parts)))


@dataclass(frozen=True, slots=True)
class Timed:
    """What threads did: ``size`` bytes in ``seconds``, with ``cpu`` processor seconds of the process."""

    size: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.size / self.seconds if self.seconds > 0 else 0.0


def run_threads(step: Callable[[int], int], threads: int, seconds: float) -> Timed:
    """Call ``step(thread)`` again and again in each of ``threads`` threads until ``seconds`` are over.

    ``step`` gives the bytes it dealt with; 0 ends its thread. An exception of a thread ends all and is raised. Ctrl-C
    ends them after the step they are in.
    """
    stop = threading.Event()
    sizes = [0] * threads
    problems: list[BaseException] = []
    gate = threading.Barrier(threads + 1)

    def work(thread: int) -> None:
        try:
            gate.wait()
            while not stop.is_set():
                done = step(thread)
                if not done:
                    return
                sizes[thread] += done
        except threading.BrokenBarrierError:
            return
        except BaseException as error:  # carried over to the caller
            problems.append(error)
            stop.set()

    workers = [threading.Thread(target=work, args=(i,), name=f"hsloader-bench-{i}") for i in range(threads)]
    try:
        for worker in workers:
            worker.start()
        gate.wait()
        begun, cpu = time.monotonic(), time.process_time()
        for worker in workers:
            worker.join(max(0.0, begun + seconds - time.monotonic()))
    finally:
        stop.set()
        gate.abort()
        for worker in workers:
            if worker.ident is not None:  # else it never started: the system has no threads left
                worker.join()
    ended = time.monotonic()
    if problems:
        raise problems[0]
    return Timed(sum(sizes), ended - begun, time.process_time() - cpu)


def process_cpu(pid: int | None) -> float:
    """Processor seconds of a process so far; 0 if it is gone."""
    if pid is None:
        return 0.0
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
