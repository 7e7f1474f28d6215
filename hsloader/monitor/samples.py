"""What was seen of a process tree: plain data, from which everything else is concluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hsloader.monitor.header import Snapshot
from hsloader.monitor.kernel import Wait, wait_of
from hsloader.monitor.procfs import DiskCounters, IoCounters, Mount, Pressure, Syscall, TaskStat

__all__ = [
    "FileSeen",
    "Glance",
    "GpuSample",
    "HostSample",
    "Observation",
    "ProcessInfo",
    "ProcessSample",
    "ThreadSample",
    "Track",
]


@dataclass(frozen=True, slots=True)
class ThreadSample:
    """One thread at one moment.

    ``links`` are what the descriptors in its system call lead to, ``path`` the file name in it, ``offset`` the
    position it asked for (pread).  ``call`` is None where the kernel does not let us see it.
    """

    tid: int
    name: str
    state: str
    cpu_ticks: int
    channel: str
    call: Syscall | None = None
    links: tuple[str, ...] = ()
    path: str | None = None
    fd: int | None = None
    offset: int | None = None
    switches: int | None = None
    idle: float | None = None
    """Seconds since it last ran, where the kernel tells."""

    @property
    def wait(self) -> Wait:
        """What it waits for."""
        return wait_of(self.state, self.call, self.channel, self.links)


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A file that a process had open for reading (``fd``) or mapped (``fd`` is -1) at one moment."""

    fd: int
    path: str
    position: int
    mount: int = 0
    size: int | None = None
    kind: str = "file"
    device: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Glance:
    """A process at one of the many moments between the two full samples; the first thread is the main one."""

    at: float
    threads: tuple[ThreadSample, ...]
    files: tuple[FileSeen, ...]


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """What does not change: who it is."""

    pid: int
    parent: int
    uid: int
    name: str
    command: tuple[str, ...]
    started: int
    age: float = 0.0
    """Seconds since it started."""
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """A process at one moment, in full.  ``memory`` holds RssAnon, RssFile, RssShmem, Pss; bytes."""

    at: float
    stat: TaskStat
    threads: tuple[ThreadSample, ...]
    links: Mapping[int, str]
    io: IoCounters | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    oom_score: int | None = None
    mapped: Mapping[str, int] = field(default_factory=dict)
    """Resident bytes of each mapped data file."""


@dataclass(slots=True)
class Track:
    """One process over the observation; ``last`` is None where it ended before."""

    info: ProcessInfo
    first: ProcessSample
    last: ProcessSample | None = None
    glances: list[Glance] = field(default_factory=list)

    @property
    def end(self) -> ProcessSample:
        """The latest full sample."""
        return self.last or self.first


@dataclass(frozen=True, slots=True)
class HostSample:
    """The machine at one moment; ``shm`` is (size, used) of /dev/shm, cgroup memory is (limit, used, kills)."""

    at: float
    disks: Mapping[str, DiskCounters]
    memory: Mapping[str, int]
    pressure: Mapping[str, Pressure] = field(default_factory=dict)
    refaults: int = 0
    """Pages that had been dropped from the page cache and were read again, since boot."""
    shm: tuple[int, int] | None = None
    cgroup: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU: utilisation as a share (mean over the observation), memory in bytes, ids of its processes.

    ``uuid`` as CUDA writes it, empty where unknown: ``index`` is that of the machine, which a process that may see
    only some GPUs counts otherwise.
    """

    index: int
    name: str
    busy: float
    memory_used: int
    memory_total: int
    processes: tuple[int, ...] = ()
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything seen of the process tree below ``root`` within ``seconds``."""

    root: int
    seconds: float
    began: float
    """Instant on the clock of the samples (time.monotonic)."""
    tracks: Mapping[int, Track]
    first: HostSample
    last: HostSample
    mounts: Mapping[int, Mount] = field(default_factory=dict)
    disk_of: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Name of the whole disk of a device number."""
    peers: Mapping[int, str] = field(default_factory=dict)
    """Remote ends of TCP sockets by inode."""
    rings: Mapping[int, tuple[Snapshot, Snapshot]] = field(default_factory=dict)
    """First and last snapshot of hsloader's ring, by the process id of its trainer."""
    gpus: Sequence[GpuSample] | None = None
    gpu_note: str = ""
    cpus: int = 1
    ticks_per_second: int = 100
    root_parent: ProcessInfo | None = None
    refused: Mapping[str, frozenset[int]] = field(default_factory=dict)
    locked: frozenset[int] = frozenset()
    silent_mounts: frozenset[int] = frozenset()
