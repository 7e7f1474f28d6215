"""One trainer with its workers as it was seen, and what may be said of it: the words that verdicts are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hsloader.monitor.header import Snapshot
from hsloader.monitor.kernel import Wait
from hsloader.monitor.samples import GpuSample
from hsloader.monitor.summary import ProcessReport

__all__ = ["READS", "HostReport", "Kind", "Situation", "Verdict", "idle_worker"]

READS = 1e6  # bytes a second from which a process counts as reading


class Kind(StrEnum):
    """What is the matter, worst first; stable names for scripts."""

    STOPPED = "stopped"
    DEAD_WORKER = "dead-worker"
    SHM_FULL = "shm-full"
    STUCK_READ = "stuck-read"
    DEADLOCK = "deadlock"
    LOST_MESSAGE = "lost-message"
    COMPILING = "compiling"
    SAME_FILE = "same-file"
    DISK = "disk"
    READING = "reading"
    LOADER = "loader"
    WORKER_CPU = "worker-cpu"
    NETWORK = "network"
    CHILD = "child"
    TRAINER = "trainer"
    SLEEPING = "sleeping"
    IDLE = "idle"
    ENDED = "ended"
    UNKNOWN = "unknown"

    @property
    def severity(self) -> int:
        """Small is worse."""
        return list(Kind).index(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence with its numbers, and what would help."""

    kind: Kind
    sentence: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The machine over the observation.  Sizes in bytes, rates in bytes a second, shares of one.

    ``disks`` maps a disk to (busy share, bytes read a second); ``refault_rate`` is what was read again after the page
    cache had dropped it; ``cgroup_memory`` is (limit, used without page cache, processes killed).
    """

    cpus: int = 1
    disks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    memory_total: int = 0
    memory_available: int = 0
    shm_size: int = 0
    shm_used: int = 0
    cgroup_memory: tuple[int, int, int] | None = None
    refault_rate: float = 0.0
    pressure: Mapping[str, float] = field(default_factory=dict)
    gpus: tuple[GpuSample, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One trainer with its workers, as the verdict sees it."""

    seconds: float
    host: HostReport
    trainer: ProcessReport | None
    workers: Sequence[ProcessReport] = ()
    compilers: Sequence[ProcessReport] = ()
    feeders: Sequence[ProcessReport] = ()
    ring: tuple[Snapshot, Snapshot] | None = None
    """hsloader's ring, where the trainer has one."""
    disk_of: Mapping[tuple[int, int], str] = field(default_factory=dict)
    batch_size: int | None = None

    @property
    def readers(self) -> Sequence[ProcessReport]:
        """The processes that ought to bring data: the workers, hsloader's feeder, or the trainer itself."""
        return self.workers or self.feeders or ([self.trainer] if self.trainer else [])

    @property
    def starved(self) -> float:
        """Share of the looks that caught the trainer wanting a core and not having one."""
        return max(0.0, self.trainer.share(Wait.RUNNING) - self.trainer.cpu) if self.trainer else 0.0

    @property
    def data_wait(self) -> float | None:
        """Share of the looks in which the trainer waited for its workers.

        None without trainer or workers, and where the trainer got a core too seldom to tell.
        """
        trainer = self.trainer
        if trainer is None or not self.workers or self.starved > _TOO_STARVED:
            return None
        share = trainer.share(Wait.PIPE) + trainer.pin_wait
        share += trainer.share(Wait.POLL) if _waits_for(trainer, self.workers) else 0.0
        # A batch's descriptor comes from its worker by a local socket.
        share += trainer.share(Wait.SOCKET) if not trainer.peers else 0.0
        return min(1.0, share / (1.0 - self.starved))  # starved looks say nothing about data


_IDLE = 0.05  # cores below which a process counts as idle
_TOO_STARVED = 0.8  # share of looks; the few that are left mean nothing


def _waits_for(process: ProcessReport, others: Sequence[ProcessReport]) -> bool:
    """Whether a process polls a pipe or socket of the others; true where the kernel hides what it polls."""
    pipes = [link for link in process.main_links if link.startswith("pipe:")]
    if not pipes:
        return not process.main_links or not process.peers
    return any(pipe in other.links for pipe in pipes for other in others)


def idle_worker(s: Situation, worker: ProcessReport) -> bool:
    """Whether a worker only waits for the trainer to ask it for something."""
    others = [s.trainer] if s.trainer else []
    polls = worker.share(Wait.POLL, Wait.PIPE) >= 0.8 and _waits_for(worker, others)
    return polls and worker.cpu < _IDLE
