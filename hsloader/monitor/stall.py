"""The stall report: what the feeder's threads, the disk and the memory are doing while ``next()`` waits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

from hsloader.monitor.access import ProcAccess
from hsloader.monitor.counters import FeederCounter, Stage, ThreadCounter, TrainerCounter
from hsloader.monitor.files import file_system_text, is_remote, mount_of
from hsloader.monitor.header import Snapshot, ThreadRow
from hsloader.monitor.host import disk_names, sample_host
from hsloader.monitor.kernel import Wait, wait_of
from hsloader.monitor.limit import limit_of
from hsloader.monitor.procfs import Mount, parse_fdinfo, parse_mountinfo, parse_stat, parse_syscall
from hsloader.monitor.samples import HostSample
from hsloader.monitor.words import plural, rate_text, share_text, size_text, time_text

__all__ = ["StallReport"]

_LOOK = 0.2  # seconds between two looks at the disk when there is no earlier one
_SHOWN = 8  # threads that are listed one by one
_SHARDS = "/segments/"  # what every path of a shard has in it
_VERBS = {
    Stage.PLAN: "planning",
    Stage.INDEX: "reading the index of",
    Stage.BUFFER: "waiting for a buffer (the decoders are behind) for",
    Stage.READ: "reading",
    Stage.DECODE: "decoding",
    Stage.DROP: "giving back pages of",
}


class StallReport:
    """Makes the reports of one stall; what it saw last makes rates of the disk's counters."""

    def __init__(self) -> None:
        self._host: HostSample | None = None
        self._snapshot: Snapshot | None = None

    def text(self, now: Snapshot, seconds: float) -> str:
        """The report after ``seconds`` of waiting.  Takes 0.2 s the first time."""
        if self._host is None:
            self._host = sample_host(os.getpid())
            time.sleep(_LOOK)
        before, self._host = self._host, sample_host(os.getpid())
        lines = [_head(now, seconds), *_feeder(now), *_threads(now), *_storage(now, before, self._host)]
        if self._snapshot is not None:
            lines.append(limit_of(self._snapshot, now).sentence)
        self._snapshot = now
        return "\n  ".join(lines)


def _head(now: Snapshot, seconds: float) -> str:
    batches = now[TrainerCounter.EPOCH_BATCHES]
    place = f"batch {now[TrainerCounter.POSITION] + 1:,}{f' of {batches:,}' if batches else ''}"
    return (
        f"next() has waited {time_text(seconds)} for {place} of epoch {now[TrainerCounter.EPOCH]}; "
        f"{now.ready} of {now.slots} in the ring ready, {now.reading} being read"
    )


def _feeder(now: Snapshot) -> Iterable[str]:
    pid = now[TrainerCounter.FEEDER_PID] or now[FeederCounter.PID]
    if _state(pid) is None:
        yield f"the feeder (pid {pid}) is gone" if pid else "no feeder runs yet"
        return
    stopped = [p for p in (pid, *now.helpers) if _state(p) in ("T", "t")]
    if stopped:
        who = f"the feeder (pid {pid})" if pid in stopped else f"the feeder's helper (pid {stopped[0]})"
        yield f"{who} is stopped; let it go on with: kill -CONT {' '.join(map(str, stopped))}"
    elif not now[FeederCounter.READY_AT]:
        yield f"the feeder (pid {pid}) is still starting"
    else:
        silent = (now.at - now[FeederCounter.SEEN_AT]) / 1e9
        if now.reading and silent > 5:
            yield f"the feeder (pid {pid}) has not looked at its requests for {time_text(silent)}"
    queued = now[FeederCounter.QUEUED_READS], now[FeederCounter.QUEUED_DECODES]
    if any(queued):
        yield f"{plural(queued[0], 'read')} and {plural(queued[1], 'decode')} wait for a thread"


def _state(pid: int) -> str | None:
    """The letter of a process's state; None if there is no such process."""
    text = ProcAccess().text(pid, "stat") if pid else None
    return None if text is None else parse_stat(text).state


def _threads(now: Snapshot) -> Iterable[str]:
    busy = [row for row in now.threads if row[ThreadCounter.TID] and row.stage is not Stage.IDLE]
    idle = sum(1 for row in now.threads if row[ThreadCounter.TID]) - len(busy)
    for row in sorted(busy, key=lambda row: row[ThreadCounter.SINCE])[:_SHOWN]:
        yield _thread(now, row)
    if len(busy) > _SHOWN:
        yield f"{len(busy) - _SHOWN} more threads are busy"
    if idle:
        yield f"{plural(idle, 'feeder thread')} {'waits' if idle == 1 else 'wait'} for work"


def _thread(now: Snapshot, row: ThreadRow) -> str:
    since = time_text(max(0.0, (now.at - row[ThreadCounter.SINCE]) / 1e9))
    kind = "read" if row[ThreadCounter.KIND] == 1 else "decode"
    place = ""
    if row[ThreadCounter.LENGTH]:
        place = f" at {size_text(row[ThreadCounter.OFFSET])} ({size_text(row[ThreadCounter.LENGTH])})"
    text = f"{kind} thread {row[ThreadCounter.TID]}: {_VERBS.get(row.stage, row.stage.name.lower())} {row.path}{place}"
    kernel = _kernel(row[ThreadCounter.PROCESS], row[ThreadCounter.TID])
    return f"{text} for {since}{f'; {kernel}' if kernel else ''}"


def _kernel(pid: int, tid: int) -> str:
    """State, wait channel and meaning of a thread, as far as the kernel shows it."""
    access = ProcAccess()
    text = access.text(pid, "stat", tid)
    if text is None:
        return "" if access.refused else "the thread is gone"
    state = parse_stat(text).state
    channel = (access.text(pid, "wchan", tid) or "").strip()
    raw = access.text(pid, "syscall", tid)
    wait = wait_of(state, parse_syscall(raw) if raw else None, channel)
    where = f", kernel wait {channel.partition('.')[0]}" if channel not in ("", "0") else ""
    return f"state {state} ({'runs' if wait is Wait.RUNNING else wait}){where}"


def _storage(now: Snapshot, before: HostSample, after: HostSample) -> Iterable[str]:
    span = max(after.at - before.at, 1e-9)
    path = str(now.info.get("dataset", ""))
    mounts = parse_mountinfo(ProcAccess().text(os.getpid(), "mountinfo") or "")
    mount = _mount(now, path, mounts)
    if mount is not None:
        text = f"{path} is on {file_system_text(mount.kind, mount.server)}"
        disk = disk_names([mount.device], mounts.values()).get(mount.device)
        if disk is not None and disk in after.disks and disk in before.disks and not is_remote(mount.kind):
            busy = min(1.0, (after.disks[disk].busy_ms - before.disks[disk].busy_ms) / 1000 / span)
            rate = (after.disks[disk].read - before.disks[disk].read) / span
            text += f"; disk {disk} is {share_text(busy)} busy and delivers {rate_text(rate)}"
        yield text
    available, total = after.memory.get("MemAvailable", 0), after.memory.get("MemTotal", 0)
    text = f"memory: {size_text(available)} of {size_text(total)} available"
    if after.cgroup is not None:
        text += f", cgroup {size_text(after.cgroup[1])} of {size_text(after.cgroup[0])} used"
    thrash = (after.refaults - before.refaults) * os.sysconf("SC_PAGE_SIZE") / span
    if thrash > 20e6:
        text += f"; the page cache thrashes: {rate_text(thrash)} are read again that had just been dropped"
    yield text


def _mount(now: Snapshot, path: str, mounts: Mapping[int, Mount]) -> Mount | None:
    """Where the data lie.

    The path may lead there by links.  To follow them is to ask a file server that may not answer; what the feeder has
    open tells without.  Before it has opened a shard the path's own text must do.
    """
    access = ProcAccess()
    for pid in (now[TrainerCounter.FEEDER_PID] or now[FeederCounter.PID], *now.helpers):
        for fd, link in access.links(pid).items():
            text = access.text(pid, f"fdinfo/{fd}") if _SHARDS in link else None
            if text and (found := mounts.get(parse_fdinfo(text).mount)):
                return found
    return mount_of(path, mounts.values())
