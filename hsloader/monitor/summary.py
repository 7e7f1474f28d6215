"""One process's samples, summed up: what it reads, how fast, what it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hsloader.monitor.files import is_remote, mount_of
from hsloader.monitor.kernel import Wait, syscall_name
from hsloader.monitor.procfs import IoCounters
from hsloader.monitor.roles import Role
from hsloader.monitor.samples import FileSeen, Glance, Observation, ProcessSample, ThreadSample, Track

__all__ = ["STORAGE_WAITS", "BusyThread", "FileReading", "ProcessReport", "summarise"]

STORAGE_WAITS = frozenset({Wait.READ, Wait.FAULT, Wait.OPEN, Wait.DISK})
_BUSY = 0.3  # cores from which a thread is listed as burning CPU
_SHORTEST = 0.2  # seconds; rates over less mean nothing
_GROWTH = 1 << 20  # resident bytes a mapped file must gain to count as being read


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReading:
    """A file that a process was seen reading.

    ``how`` is ``read`` (position moved or a thread was in a read call), ``mapped`` (its pages were brought in),
    ``open`` (a thread was opening it, or it was merely open while the process read).  ``seen`` counts the looks that
    caught it open, ``read`` those that caught it being read, ``opened`` those that found it newly open.
    """

    path: str
    position: int
    size: int | None
    how: str
    kind: str = "file"
    seen: int = 1
    read: int = 0
    opened: int = 0
    file_system: str = ""
    remote: bool = False
    server: str | None = None
    device: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class BusyThread:
    """A thread that used at least 0.3 cores; ``frames`` come from py-spy, innermost first."""

    tid: int
    name: str
    cpu: float
    frames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """One process over the observation.  Rates in bytes a second, times in seconds, sizes in bytes.

    ``waits`` is the share of the looks in which the main thread was in each wait.  ``still`` is how long the
    deciding thread has been in one wait without ever running, 0 where it ran within the observation.
    """

    pid: int
    parent: int
    role: Role
    label: str
    command: str
    state: str
    wait: Wait
    call: str | None
    channel: str
    still: float
    waits: Mapping[Wait, float]
    peers: tuple[str, ...] = ()
    file: FileReading | None = None
    files: tuple[FileReading, ...] = ()
    read_rate: float = 0.0
    disk_rate: float = 0.0
    mapped_rate: float = 0.0
    files_per_second: float = 0.0
    cpu: float = 0.0
    age: float = 0.0
    threads: int = 1
    busy_threads: tuple[BusyThread, ...] = ()
    asleep: bool = False
    """No thread of it ran at all."""
    locked_up: bool = False
    """Asleep, and no thread waits for anything that could come from outside: only for locks."""
    resident: int = 0
    proportional: int | None = None
    oom_score: int | None = None
    exit_code: int | None = None
    dead_at_first: bool = False
    """It was dead when the observation began."""
    rank: int | None = None
    main_links: tuple[str, ...] = ()
    links: frozenset[str] = field(default_factory=frozenset)
    """What its descriptors led to in the first and in the last look."""
    pin_wait: float = 0.0
    """Share of the looks in which the main thread waited for its pin-memory thread, and that for the workers."""

    @property
    def rate(self) -> float:
        """Bytes a second that it read, by calls and through maps."""
        return self.read_rate + self.mapped_rate

    def share(self, *waits: Wait) -> float:
        """Share of the looks in which the main thread was in any of these waits."""
        return sum(self.waits.get(w, 0.0) for w in waits)


def summarise(observation: Observation, track: Track, role: Role, label: str) -> ProcessReport:
    """Sum up what was seen of one process."""
    first, last, info = track.first, track.end, track.info
    # What started within the observation has all its counters from it.
    young = info.age < last.at - observation.began
    until = last.at if track.last or not track.glances else track.glances[-1].at
    span = max(until - (observation.began if young else first.at), _SHORTEST)
    thread = _deciding(track)
    files = tuple(_files(observation, track))
    waits = Counter(g.threads[0].wait for g in track.glances if g.threads) or Counter([_main(last).wait])
    total = sum(waits.values())
    io_before = IoCounters(0, 0, 0, 0) if young else first.io
    read = last.io.rchar - io_before.rchar if last.io and io_before else 0
    disk = last.io.read_bytes - io_before.read_bytes if last.io and io_before else 0
    cpu_before = 0 if young else first.stat.cpu_ticks
    opened = sum(f.opened for f in files) / span
    sizes = [f.size for f in files if f.size]
    if opened and sizes and read > 0:
        # The looks miss files that are read faster than they come; whole files' bytes tell of those too.
        opened = max(opened, read / span / (sum(sizes) / len(sizes)))
    hz = observation.ticks_per_second
    return ProcessReport(
        pid=info.pid,
        parent=info.parent,
        role=role,
        label=label,
        command=" ".join(info.command) or f"[{info.name}]",
        state=last.stat.state,
        wait=thread.wait,
        call=syscall_name(thread.call),
        channel=thread.channel.partition(".")[0] if thread.channel != "0" else "",
        still=_still(track, thread, observation.seconds),
        waits={wait: count / total for wait, count in waits.most_common()},
        peers=tuple(_peers(observation, thread.links)),
        file=_current(observation, files, thread),
        files=files,
        read_rate=max(0, read) / span,
        disk_rate=max(0, disk) / span,
        mapped_rate=sum(_growth(first, last).values()) / span,
        files_per_second=opened,
        cpu=max(0, _ticks(track) - cpu_before) / hz / span,
        age=info.age,
        threads=last.stat.threads,
        busy_threads=tuple(_busy(first, last, hz * span)),
        asleep=_asleep(first, last),
        locked_up=_asleep(first, last) and all(t.wait in (Wait.LOCK, Wait.ACCEPT) for t in last.threads),
        resident=last.memory.get("VmRSS", 0),
        proportional=last.memory.get("Pss"),
        oom_score=last.oom_score,
        dead_at_first=first.stat.state in "ZX",
        exit_code=last.stat.exit_code if last.stat.state in "ZX" else None,
        rank=info.rank,
        main_links=_main(last).links,
        links=frozenset(first.links.values()) | frozenset(last.links.values()),
        pin_wait=sum(_waits_for_pinning(g) for g in track.glances) / max(len(track.glances), 1),
    )


def _ticks(track: Track) -> int:
    """CPU ticks at the end; a process that ended before has its last ones from the glances."""
    if track.last is not None or not track.glances or not track.glances[-1].threads:
        return track.end.stat.cpu_ticks
    return max(track.first.stat.cpu_ticks, track.glances[-1].threads[0].cpu_ticks)


def _main(sample: ProcessSample) -> ThreadSample:
    if sample.threads:
        return sample.threads[0]
    return ThreadSample(sample.stat.pid, sample.stat.name, sample.stat.state, sample.stat.cpu_ticks, "")


def _deciding(track: Track) -> ThreadSample:
    """The main thread, or, where that only waits for others, a thread of it that is stuck in storage."""
    last = track.end
    main = _main(last)
    if main.wait not in STORAGE_WAITS and main.wait not in (Wait.RUNNING, Wait.ZOMBIE, Wait.STOPPED, Wait.TRACED):
        for thread in last.threads:
            if thread.wait in STORAGE_WAITS:
                return thread
    return main


def _still(track: Track, thread: ThreadSample, seconds: float) -> float:
    if thread.state == "R" or track.last is None:
        return 0.0
    before = next((t for t in track.first.threads if t.tid == thread.tid), None)
    if before is None or before.cpu_ticks != thread.cpu_ticks or before.switches != thread.switches:
        return 0.0
    known = thread.idle if thread.idle is not None else 0.0
    return min(max(known, seconds), track.info.age or max(known, seconds))


def _asleep(first: ProcessSample, last: ProcessSample) -> bool:
    before = {t.tid: (t.cpu_ticks, t.switches) for t in first.threads}
    return first is not last and all(before.get(t.tid) == (t.cpu_ticks, t.switches) for t in last.threads)


def _busy(first: ProcessSample, last: ProcessSample, ticks: float) -> Iterable[BusyThread]:
    before = {t.tid: t.cpu_ticks for t in first.threads}
    shares = [(t, (t.cpu_ticks - before.get(t.tid, t.cpu_ticks)) / ticks) for t in last.threads]
    for thread, share in sorted(shares, key=lambda pair: -pair[1]):
        if share >= _BUSY:
            yield BusyThread(thread.tid, thread.name, share)


def _waits_for_pinning(glance: Glance) -> bool:
    # A pinning thread that itself waits for a lock has a batch and nobody who takes it.
    locks = (Wait.LOCK, Wait.TIMED_LOCK)
    pinning = [t for t in glance.threads if t.name == "pt_data_pin"]
    waits = bool(glance.threads) and glance.threads[0].wait in locks
    return waits and any(t.wait not in locks for t in pinning)


def _peers(observation: Observation, links: Iterable[str]) -> Iterable[str]:
    for link in links:
        inode = link[8:-1] if link.startswith("socket:[") else ""
        if inode.isdigit() and int(inode) in observation.peers:
            yield observation.peers[int(inode)]


def _growth(first: ProcessSample, last: ProcessSample) -> dict[str, int]:
    gained = {path: size - first.mapped.get(path, 0) for path, size in last.mapped.items()}
    return {path: size for path, size in gained.items() if size >= _GROWTH}


def _files(observation: Observation, track: Track) -> Iterable[FileReading]:
    """The files that the process was seen reading, the latest first; else those that it merely had open."""
    found: dict[str, _Evidence] = {}
    previous: Glance | None = None
    for glance in track.glances:
        _note_positions(found, glance, previous)
        _note_calls(found, glance)
        previous = glance
    _note_maps(found, track.glances)
    ends = {f.path: f for g in track.glances for f in g.files if f.fd < 0}
    for path in _growth(track.first, track.end):
        evidence = found.setdefault(path, _Evidence())
        evidence.how, evidence.position = "mapped", track.end.mapped[path]
        evidence.reads += 1
        evidence.when = track.end.at
        evidence.file = evidence.file or ends.get(path)
    read = {path: e for path, e in found.items() if e.reads} or found
    for path, evidence in sorted(read.items(), key=lambda item: -item[1].when):
        yield _reading(observation, path, evidence)


@dataclass(slots=True)
class _Evidence:
    file: FileSeen | None = None
    how: str = "open"
    position: int = 0
    looks: int = 0
    opened: int = 0
    reads: int = 0
    """Looks that caught it being read: a thread in a read call, a moved position, newly opened, pages mapped in."""
    when: float = 0.0


def _note_positions(found: dict[str, _Evidence], glance: Glance, previous: Glance | None) -> None:
    before = {(f.fd, f.path): f for f in previous.files} if previous else {}
    for file in glance.files:
        if file.fd < 0:
            continue
        evidence = found.setdefault(file.path, _Evidence())
        evidence.file = file
        evidence.looks += 1
        old = before.get((file.fd, file.path))
        evidence.position = file.position
        if previous is None or (old is not None and old.position == file.position):
            continue
        evidence.reads += 1
        evidence.when = glance.at
        evidence.opened += old is None
        if old is not None or file.position:
            evidence.how = "read"


def _note_maps(found: dict[str, _Evidence], glances: Iterable[Glance]) -> None:
    known: set[str] | None = None  # paths of the last look at the maps; not every glance looks
    for glance in glances:
        mapped = {f.path: f for f in glance.files if f.fd < 0}
        if not mapped and known is None:
            continue
        for path in mapped.keys() - (known if known is not None else mapped.keys()):
            evidence = found.setdefault(path, _Evidence())
            evidence.file, evidence.how, evidence.when = mapped[path], "mapped", glance.at
            evidence.position = 0
            evidence.reads += 1
            evidence.opened += 1
        known = set(mapped) if mapped else known


def _note_calls(found: dict[str, _Evidence], glance: Glance) -> None:
    for thread in glance.threads:
        if thread.wait is not Wait.READ or not thread.links:
            continue
        path = thread.links[0]
        file = next((f for f in glance.files if f.path == path), None)
        if file is not None:
            evidence = found.setdefault(path, _Evidence())
            evidence.file, evidence.how, evidence.when = file, "read", glance.at
            evidence.reads += 1
            if thread.offset is not None:
                evidence.position = thread.offset


def _reading(observation: Observation, path: str, evidence: _Evidence) -> FileReading:
    seen = evidence.file
    mount = observation.mounts.get(seen.mount) if seen and seen.mount else mount_of(path, observation.mounts.values())
    return FileReading(
        path=path,
        position=evidence.position,
        size=seen.size if seen else None,
        how=evidence.how,
        kind=seen.kind if seen else "file",
        seen=max(evidence.looks, 1),
        opened=evidence.opened,
        read=evidence.reads,
        file_system=mount.kind if mount else "",
        remote=mount is not None and is_remote(mount.kind),
        server=mount.server if mount else None,
        device=seen.device if seen and seen.device != (0, 0) else mount.device if mount else (0, 0),
    )


def _current(observation: Observation, files: tuple[FileReading, ...], thread: ThreadSample) -> FileReading | None:
    """The file that the deciding thread is in right now, else the best supported one."""
    paths = [*thread.links[:1], *([thread.path] if thread.path else [])]
    for path in paths:
        for file in files:
            if file.path == path:
                return file
    if thread.wait is Wait.OPEN and thread.path:
        mount = mount_of(thread.path, observation.mounts.values())
        return FileReading(
            path=thread.path,
            position=0,
            size=None,
            how="open",
            file_system=mount.kind if mount else "",
            remote=mount is not None and is_remote(mount.kind),
            server=mount.server if mount else None,
        )
    return files[0] if files else None
