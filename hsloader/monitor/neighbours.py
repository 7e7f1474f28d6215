"""The loaders of this machine, found through the memory files of their rings: for ``top`` and for the slowest rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hsloader.monitor.access import processes
from hsloader.monitor.counters import TrainerCounter
from hsloader.monitor.header import MEMFD_NAME, OtherVersionError, Snapshot, take_snapshot
from hsloader.monitor.stats import Interval

__all__ = ["FoundRing", "Siblings", "find_rings", "job_name"]

_LINK = f"/memfd:{MEMFD_NAME}"
_FIRST_SEARCH = 2.0  # seconds; other ranks start their feeders in their own time
FEEDER_NAME = "hsl-feeder"  # what the feeder calls itself; it has few descriptors, so it is quick to look through
_JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "OMPI_MCA_ess_base_jobid")


def job_name(environment: Mapping[str, str] | None = None) -> str:
    """What tells the ranks of one job from those of another on the same machine; empty where nothing does.

    ``torchrun`` without ``--rdzv-id`` names every run ``none``; then its port is part of the name.
    """
    known = os.environ if environment is None else environment
    for name in _JOBS:
        if known.get(name):
            value = known[name]
            return f"{value}:{known.get('MASTER_PORT', '')}" if value == "none" else value
    return (
        f"{known['MASTER_ADDR']}:{known['MASTER_PORT']}"
        if known.get("MASTER_ADDR") and known.get("MASTER_PORT")
        else ""
    )


@dataclass(frozen=True, slots=True)
class FoundRing:
    """A ring: ``key`` tells it from others, ``path`` opens it again, ``owner`` is the trainer's process id."""

    key: tuple[int, int]
    path: str
    owner: int
    snapshot: Snapshot


def find_rings(pids: Iterable[int] | None = None, *, foreign: set[int] | None = None) -> list[FoundRing]:
    """The rings of all processes that this user may look into (or of ``pids``), each once, whose trainers live.

    ``foreign`` takes the processes that hold a ring of another version of hsloader, which cannot be read.
    """
    found: dict[tuple[int, int], FoundRing] = {}
    for pid in processes() if pids is None else pids:
        for path in _ring_paths(pid):
            try:
                ring = open_ring(path)
            except OtherVersionError:
                if foreign is not None:
                    foreign.add(pid)
                continue
            if ring is not None and ring.key not in found:
                found[ring.key] = ring
    return sorted(found.values(), key=lambda ring: (ring.owner, ring.key))


def _ring_paths(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # ended, or another user's
        return
    for name in names:
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}").startswith(_LINK):
                yield f"{folder}/{name}"


def open_ring(path: str) -> FoundRing | None:
    """The ring behind a ``/proc/PID/fd`` path; None if it is gone, none, closed, or its trainer has ended.

    ``OtherVersionError`` if another version of hsloader made it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        snapshot = take_snapshot(fd)
    except OtherVersionError:
        raise
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    owner = snapshot.info.get("owner", 0)
    ended = not isinstance(owner, int) or not Path(f"/proc/{owner}").exists()
    if ended or snapshot[TrainerCounter.CLOSED_AT]:
        return None
    return FoundRing((status.st_dev, status.st_ino), path, owner, snapshot)


class Siblings:
    """The other ranks of this job on this machine, for a heartbeat: looked for seldom, read cheaply.

    A search that finds a new one is followed by another soon; one that does not, after twice the time, up to
    ``search_every`` seconds.
    """

    def __init__(self, job: str, rank: int, search_every: float = 300.0) -> None:
        self._job = job
        self._rank = rank
        self._search_every = search_every
        self._pause = _FIRST_SEARCH
        self._searched = -search_every
        self._rings: dict[tuple[int, int], FoundRing] = {}

    def slowest(self) -> tuple[int, float, int] | None:
        """``(rank, share of the time it waited, ranks seen)`` of the rank that waited most since the call before.

        None where there are no others, or nothing to compare with yet.
        """
        before = dict(self._rings)
        self._look()
        waits: dict[int, float] = {}
        for key, ring in self._rings.items():
            rank = ring.snapshot.info.get("rank")
            if key in before and isinstance(rank, int) and ring.snapshot.at > before[key].snapshot.at:
                # A rank may have more than one: a loader that validates beside the one that trains.
                share = Interval(before[key].snapshot, ring.snapshot).data_wait
                waits[rank] = max(waits.get(rank, 0.0), share)
        if not set(waits) - {self._rank}:
            return None
        worst = max(waits, key=lambda rank: waits[rank])
        return worst, waits[worst], len(waits)

    def _look(self) -> None:
        again = {key: open_ring(ring.path) for key, ring in self._rings.items()}
        self._rings = {key: ring for key, ring in again.items() if ring is not None and ring.key == key}
        now = time.monotonic()
        if len(self._rings) < len(again) or now - self._searched >= self._pause:
            self._searched, known = now, len(self._rings)
            feeders = [pid for pid in processes() if _name(pid) == FEEDER_NAME]
            for ring in find_rings(feeders):
                if ring.snapshot.info.get("job") == self._job:
                    self._rings.setdefault(ring.key, ring)
            found = len(self._rings) > known
            self._pause = _FIRST_SEARCH if found else min(2 * self._pause, self._search_every)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
