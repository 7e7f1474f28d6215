"""From what was seen of a process tree to one verdict in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hsloader.monitor.files import file_system_text
from hsloader.monitor.header import Snapshot
from hsloader.monitor.kernel import Wait
from hsloader.monitor.limit import Limit, limit_of
from hsloader.monitor.samples import GpuSample
from hsloader.monitor.summary import STORAGE_WAITS, FileReading, ProcessReport
from hsloader.monitor.words import listed, plural, rate_text, share_text, size_text, time_text

__all__ = ["HostReport", "Kind", "Situation", "Verdict", "exit_text", "judge"]


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
    def data_wait(self) -> float | None:
        """Share of the looks in which the trainer waited for its workers; None without trainer or workers."""
        trainer = self.trainer
        if trainer is None or not self.workers:
            return None
        share = trainer.share(Wait.PIPE)
        share += trainer.share(Wait.POLL) if waits_for(trainer, self.workers) else 0.0
        share += trainer.pin_wait
        # Looks that caught it wanting a core and not having one say nothing about data.
        starved = max(0.0, trainer.share(Wait.RUNNING) - trainer.cpu)
        return min(1.0, share / max(1.0 - starved, 0.05))


_READS = 1e6  # bytes a second from which a process counts as reading
_IDLE = 0.05  # cores below which a process counts as idle


def waits_for(process: ProcessReport, others: Sequence[ProcessReport]) -> bool:
    """Whether a process polls a pipe or socket of the others; true where the kernel hides what it polls."""
    pipes = [link for link in process.main_links if link.startswith("pipe:")]
    if not pipes:
        return not process.main_links or not process.peers
    return any(pipe in other.links for pipe in pipes for other in others)


def judge(situation: Situation) -> Verdict:
    """The verdict on one trainer and its workers: the worst thing that the samples show."""
    checks = (
        _stopped,
        _dead,
        _shm_full,
        _stuck,
        _deadlock,
        _lost,
        _compiling,
        _loader,
        _same_file,
        _reading,
        _network,
        _sleeping,
        _trainer,
        _idle,
    )
    for check in checks:
        verdict = check(situation)
        if verdict is not None:
            return verdict
    return Verdict(Kind.UNKNOWN, "nothing stands out in what could be seen")


def exit_text(status: int | None) -> str:
    """`` (killed by signal 9)`` or `` (exit code 1)`` of a wait status; empty where it is not known."""
    if status is None:
        return ""
    return f" (killed by signal {status & 0x7F})" if status & 0x7F else f" (exit code {status >> 8})"


def _stopped(s: Situation) -> Verdict | None:
    for process in (*s.workers, *s.feeders, *([s.trainer] if s.trainer else [])):
        if process.wait is Wait.STOPPED:
            return Verdict(
                Kind.STOPPED,
                f"{process.label} is stopped (by SIGSTOP or ctrl-Z)",
                f"let it go on with: kill -CONT {process.pid}",
            )
        if process.wait is Wait.TRACED:
            return Verdict(Kind.STOPPED, f"{process.label} is held by a debugger or strace", "end the debugger")
    return None


def _dead(s: Situation) -> Verdict | None:
    for process in s.workers:
        # One that ended well is collected in a moment; one that is not, or ended badly, is the trouble.
        if process.wait is not Wait.ZOMBIE or not (process.exit_code or process.dead_at_first):
            continue
        signal = (process.exit_code or 0) & 0x7F
        how = exit_text(process.exit_code).strip(" ()")
        kills = s.host.cgroup_memory[2] if s.host.cgroup_memory else 0
        if signal == 9:
            how += ", as the kernel does when memory is short"
            how += f" (it counts {plural(kills, 'such kill')} in this cgroup)" if kills else ""
        elif signal == 7:
            how += ", a bus error: /dev/shm was full, or a mapped file was cut or could not be read"
        return Verdict(
            Kind.DEAD_WORKER,
            f"{process.label} is dead ({how}) and the trainer has not noticed",
            "restart the run; with less memory a worker (fewer workers, smaller prefetch_factor) if memory was short",
        )
    return None


def _shm_full(s: Situation) -> Verdict | None:
    host = s.host
    if not s.workers or not host.shm_size or host.shm_used < 0.97 * host.shm_size:
        return None
    return Verdict(
        Kind.SHM_FULL,
        f"/dev/shm is full ({size_text(host.shm_used)} of {size_text(host.shm_size)}): DataLoader workers hand batches "
        "over through it and die with a bus error",
        "make it larger (docker run --shm-size=..., a memory-backed emptyDir in Kubernetes), or use fewer workers",
    )


def _stuck(s: Situation) -> Verdict | None:
    long = min(0.9 * s.seconds, 1.5)
    stuck = [p for p in s.readers if p.wait in STORAGE_WAITS and p.still >= long]
    if not stuck:
        return None
    worst = max(stuck, key=lambda p: p.still)
    file, since = worst.file, time_text(worst.still)
    others = f" ({len(stuck)} of {len(s.readers)} are)" if len(stuck) > 1 else ""
    rest = [p for p in s.readers if p not in stuck]
    rest_text = ""
    if rest:
        moving = sum(p.rate for p in rest)
        rest_text = f"; the other {len(rest)} read at {rate_text(moving)}" if moving >= _READS else ""
        rest_text = rest_text or f"; {'the other waits' if len(rest) == 1 else f'the other {len(rest)} wait'}"
    if worst.channel.startswith(("wait_for_partner", "fifo_open")) or (file is not None and file.kind == "fifo"):
        doing = "opening" if worst.wait is Wait.OPEN else "reading"
        path = f"the named pipe {file.path}" if file else "a named pipe (the kernel hides which)"
        return Verdict(
            Kind.STUCK_READ,
            f"{worst.label} has been {doing} {path} for {since}{others}: nobody writes to it{rest_text}",
            "start the program that writes to the pipe, or look why it stopped",
        )
    verb = {Wait.OPEN: "open", Wait.FAULT: "page fault"}.get(worst.wait, "read")
    kernel = f", kernel wait {worst.channel}" if worst.channel else ""
    return Verdict(
        Kind.STUCK_READ,
        f"{worst.label} has been in the same {verb}{_where(file)} for {since}{others}{kernel}{rest_text}",
        _storage_advice(s, file),
    )


def _where(file: FileReading | None) -> str:
    if file is None:
        return ""
    at = f" at {size_text(file.position)}" if file.how != "open" else ""
    of = f" of {size_text(file.size)}" if file.size else ""
    place = f" on {file_system_text(file.file_system, file.server)}" if file.file_system else ""
    return f" of {file.path}{f' ({at}{of})'.replace('( ', '(') if at or of else ''}{place}"


def _storage_advice(s: Situation, file: FileReading | None) -> str:
    if file is not None and file.server:
        return (
            f"the file server {file.server} does not answer: look at it, at the network, and at dmesg on this machine"
        )
    disk = s.disk_of.get(file.device) if file else None
    busy = f" ({disk} is {share_text(s.host.disks[disk][0])} busy)" if disk in s.host.disks and disk else ""
    return f"the storage does not answer{busy}: look at dmesg and at the disk"


def _deadlock(s: Situation) -> Verdict | None:
    long = min(0.9 * s.seconds, 1.5)
    waiting = s.workers or ([s.trainer] if s.trainer else [])
    stuck = [p for p in waiting if p.wait is Wait.LOCK and p.locked_up and p.still >= long]
    if not stuck or (s.data_wait is not None and s.data_wait < 0.9):
        return None
    since = time_text(min(p.still for p in stuck))
    if not s.workers:
        return Verdict(
            Kind.DEADLOCK,
            f"{stuck[0].label} waits for a lock and none of its threads has run for {since}: likely a deadlock",
            f"see where it waits: py-spy dump --pid {stuck[0].pid}",
        )
    who = listed([p.label for p in stuck])
    if len(stuck) == len(s.workers):
        every = {1: f"the only worker, {stuck[0].label}, waits", 2: "both workers wait"}
        who = every.get(len(stuck), f"all {len(stuck)} workers wait")
    else:
        who += " waits" if len(stuck) == 1 else " wait"
    return Verdict(
        Kind.DEADLOCK,
        f"{who} for a lock and nothing in them has run for {since}: likely a deadlock after fork (another thread "
        "held the lock when the workers were forked)",
        "create the DataLoader with multiprocessing_context='spawn', or before anything that starts threads "
        f"(tokenizers, OpenMP, tensorstore, gRPC); see the line with: py-spy dump --pid {stuck[0].pid}",
    )


def _idle_worker(s: Situation, worker: ProcessReport) -> bool:
    others = [s.trainer] if s.trainer else []
    polls = worker.share(Wait.POLL, Wait.PIPE) >= 0.8 and waits_for(worker, others)
    return polls and worker.cpu < _IDLE


def _lost(s: Situation) -> Verdict | None:
    waits = s.data_wait
    if waits is None or waits < 0.95 or not all(_idle_worker(s, w) for w in s.workers):
        return None
    return Verdict(
        Kind.LOST_MESSAGE,
        f"the trainer waits for its {plural(len(s.workers), 'worker')} and the workers wait for the trainer: a message "
        "between them was lost, as happens when a worker is killed while it holds the queue's lock",
        "restart the run; set timeout= on the DataLoader so that this ends in an error",
    )


def _compiling(s: Situation) -> Verdict | None:
    busy = [c for c in s.compilers if c.cpu >= 0.2 or "compile_worker" not in c.command]
    if not busy:
        return None
    names = sorted({c.label for c in busy})
    cores = sum(c.cpu for c in busy)
    return Verdict(
        Kind.COMPILING,
        f"torch.compile is running: {plural(len(busy), 'compiler process', 'compiler processes')} ({listed(names)}) "
        f"used {cores:.1f} of {s.host.cpus} cores; that takes minutes the first time, and the data wait for it",
        "",
    )


def _loader(s: Situation) -> Verdict | None:
    """What hsloader's own counters say, which is more than can be seen from outside."""
    if s.ring is None:
        return None
    found = limit_of(*s.ring)
    kinds = {Limit.TRAINER: Kind.TRAINER, Limit.DISK: Kind.DISK}
    dataset = s.ring[1].info.get("dataset", "its dataset")
    return Verdict(kinds.get(found.limit, Kind.LOADER), f"hsloader reads {dataset}; {found.sentence}", found.advice)


def _same_file(s: Situation) -> Verdict | None:
    caught: list[tuple[ProcessReport, FileReading, float]] = []
    for process in s.readers:
        # Of several files the looks would have caught others too; the same one in six looks is no accident.
        if len(process.files) != 1 or not (file := process.files[0]).size or file.kind != "file":
            continue
        times = process.read_rate * s.seconds / file.size
        if times >= 4 and file.read >= 2 and file.seen >= 6:
            caught.append((process, file, times))
    if not caught or len(caught) < len([p for p in s.readers if p.rate >= _READS]):
        return None
    process, file, _ = caught[0]
    total = round(sum(times for _, f, times in caught if f.path == file.path))
    rate = sum(p.read_rate for p, _, _ in caught)
    paths = {f.path for _, f, _ in caught}
    if len(paths) > 1:
        return Verdict(
            Kind.SAME_FILE,
            f"each of {plural(len(caught), 'worker')} reads one file again and again, "
            f"{rate_text(rate)} together; first of them {file.path} ({size_text(file.size or 0)})",
            "keep it open or in memory: __getitem__ loads a whole file for every item",
        )
    who = process.label if len(caught) == 1 else f"{len(caught)} workers together"
    return Verdict(
        Kind.SAME_FILE,
        f"one file is read again and again: {file.path} ({size_text(file.size or 0)}), {total} times in "
        f"{time_text(s.seconds)} by {who}, {rate_text(rate)}",
        "keep it open or in memory: __getitem__ loads a whole file for every item",
    )


def _reading(s: Situation) -> Verdict | None:
    active = [p for p in s.readers if p.rate >= _READS or p.disk_rate >= _READS or _in_storage(p)]
    waits = s.data_wait
    if waits is not None and waits < 0.5:
        return None  # the workers read ahead; the trainer is the limit
    busy = [p for p in s.workers if p.cpu >= 0.7]
    if not active:
        return _worker_cpu(s, busy) if busy and waits is not None else None
    rate, from_disk = sum(p.rate for p in active), sum(p.disk_rate for p in active)
    sizes = [f.size for p in active for f in p.files if f.size]
    mean = sum(sizes) / len(sizes) if sizes else 0
    fast = max(rate, from_disk)
    mapped = [p for p in active if any(f.how == "mapped" for f in p.files)]
    if mapped and from_disk < _READS:
        # Pages that are in memory are mapped without a trace that could be counted.
        fast = 0.0
        text = f"{_who(s, active)} {_what(active, mean)} through maps, from the page cache"
    else:
        fast = from_disk if mapped else fast
        text = f"{_who(s, active)} {_what(active, mean)} at {rate_text(fast)}"
        text += " together" if len(active) > 1 else ""
    disk, sentence = _disk_part(s, active, from_disk, rate)
    text += f"; {sentence}" if sentence and fast else ""
    if waits is not None:
        text += f"; the trainer waited for data {share_text(waits)} of the time"
    text += "; nothing is deadlocked"
    if mean and fast:
        text += f"; a batch of {s.batch_size} needs" if s.batch_size else "; one file needs"
        text += f" {time_text((s.batch_size or 1) * mean / fast)} at this rate"
    # Busy workers whose bytes come from memory: the disk has nothing to do with it.
    if busy and len(busy) * 2 >= len(s.workers) and not disk and from_disk < 0.5 * rate:
        text += f"; {plural(len(busy), 'worker')} used {sum(p.cpu for p in busy):.1f} cores"
        return Verdict(Kind.WORKER_CPU, text, _CPU_ADVICE)
    return Verdict(Kind.DISK if disk else Kind.READING, text, _READ_ADVICE)


_CPU_ADVICE = (
    "the workers' CPU is the limit (unpickling, copies, casts), not the disk: hsloader convert once, or more workers"
)
_READ_ADVICE = "hsloader convert makes the files smaller and hsloader.DataLoader reads only the rows a batch needs"


def _in_storage(process: ProcessReport) -> bool:
    return process.share(*STORAGE_WAITS) >= 0.3


def _who(s: Situation, active: Sequence[ProcessReport]) -> str:
    if not s.workers:
        return "the training process itself (no workers)"
    return active[0].label if len(active) == 1 else f"{len(active)} workers"


def _what(active: Sequence[ProcessReport], mean: float) -> str:
    verb = "reads" if len(active) == 1 else "read"
    current = {p.file.path: p.file for p in active if p.file is not None}
    if not current:
        return verb
    if len(current) == 1:
        path, file = next(iter(current.items()))
        return f"{verb} {path}{f' ({size_text(file.size)})' if file.size else ''}"
    first = next(iter(current))
    return f"{verb} {len(current)} files{f' of {size_text(mean)}' if mean else ''} (one is {first})"


def _disk_part(s: Situation, active: Sequence[ProcessReport], from_disk: float, rate: float) -> tuple[bool, str]:
    """Whether a disk or server is the limit, and the words for it."""
    files = [p.file for p in active if p.file is not None]
    remote = [f for f in files if f.remote]
    waiting = sum(p.share(*STORAGE_WAITS) for p in active) / len(active)
    if remote:
        place = file_system_text(remote[0].file_system, remote[0].server)
        return waiting >= 0.5, f"{place} answers at {rate_text(from_disk or rate)}"
    disks = {name for f in files if (name := s.disk_of.get(f.device)) and name in s.host.disks}
    if not disks:
        return False, ""
    name = max(disks, key=lambda d: s.host.disks[d][0])
    busy, disk_rate = s.host.disks[name]
    if from_disk < 0.05 * rate and busy < 0.5:
        return False, f"nearly all of it comes from the page cache, not from disk {name}"
    text = f"disk {name} is {share_text(busy)} busy and delivers {rate_text(disk_rate)}"
    if waiting >= 0.7 and busy < 0.5 and from_disk >= 0.3 * rate:
        # Waiting for a disk that is not busy: something in front of it holds the reads back.
        limit = "though reads waited for it {} of the time: a bandwidth limit of the volume or the cgroup"
        return True, f"{text}, {limit.format(share_text(waiting))}"
    return busy >= 0.8 or (waiting >= 0.7 and from_disk >= 0.3 * rate), text


def _worker_cpu(s: Situation, busy: Sequence[ProcessReport]) -> Verdict:
    return Verdict(
        Kind.WORKER_CPU,
        f"{plural(len(busy), 'worker')} of {len(s.workers)} burn the CPU ({sum(p.cpu for p in busy):.1f} of "
        f"{s.host.cpus} cores) and read next to nothing; the trainer waited for data "
        f"{share_text(s.data_wait or 0)} of the time",
        f"see what they compute: py-spy dump --pid {busy[0].pid}",
    )


def _network(s: Situation) -> Verdict | None:
    waiting = [p for p in s.readers if p.share(Wait.SOCKET, Wait.POLL) >= 0.8 and p.peers]
    if not waiting or (s.data_wait is not None and s.data_wait < 0.5):
        return None
    peers = sorted({peer for p in waiting for peer in p.peers})
    return Verdict(
        Kind.NETWORK,
        f"{listed([p.label for p in waiting])} {'waits' if len(waiting) == 1 else 'wait'} for the network "
        f"({listed(peers)})",
        "if that is object storage, it is the limit; if it is another rank, examine that one",
    )


def _sleeping(s: Situation) -> Verdict | None:
    asleep = [w for w in s.workers if w.share(Wait.SLEEP) >= 0.8]
    if not asleep or (s.data_wait is not None and s.data_wait < 0.5):
        return None
    return Verdict(
        Kind.SLEEPING,
        f"{listed([w.label for w in asleep])} {'sleeps' if len(asleep) == 1 else 'sleep'}: the dataset calls "
        "time.sleep or waits for a signal, and the trainer waits for it",
        f"see where: py-spy dump --pid {asleep[0].pid}",
    )


def _trainer(s: Situation) -> Verdict | None:
    trainer = s.trainer
    if trainer is None:
        return None
    gpu = _gpu_part(s.host)
    waits = s.data_wait
    ready = [w for w in s.workers if _idle_worker(s, w)]
    data = ""
    if s.workers:
        data = f"; it waited for data {share_text(waits or 0)} of the time"
        if ready:
            verb = "waits" if len(ready) == 1 else "wait"
            data += f", and {len(ready)} of {plural(len(s.workers), 'worker')} {verb} for it to ask"
    if trainer.cpu >= 0.5 or trainer.share(Wait.RUNNING, Wait.DRIVER) >= 0.5:
        kind, doing = Kind.TRAINER, f"computes ({trainer.cpu:.1f} of {s.host.cpus} cores{gpu})"
    elif trainer.share(Wait.SLEEP) >= 0.8:
        kind, doing = Kind.SLEEPING, f"sleeps (time.sleep or a signal wait{gpu})"
    elif trainer.share(Wait.CHILD) >= 0.8:
        kind, doing = Kind.CHILD, f"waits for a child process{gpu}"
    else:
        return None
    tail = ": data are not the limit" if waits is not None and waits < 0.5 else ""
    return Verdict(kind, f"{trainer.label} {doing}{data}{tail}", _trainer_advice(s, kind))


def _gpu_part(host: HostReport) -> str:
    if not host.gpus:
        return ""
    return f", GPU {', '.join(share_text(g.busy) for g in host.gpus)} busy"


def _trainer_advice(s: Situation, kind: Kind) -> str:
    if kind is Kind.TRAINER and s.trainer is not None and s.host.gpus and max(g.busy for g in s.host.gpus) < 0.2:
        return f"the GPU waits for Python in the training process: py-spy dump --pid {s.trainer.pid}"
    return ""


def _idle(s: Situation) -> Verdict | None:
    main = s.trainer or (s.workers[0] if s.workers else None)
    if main is None:
        return None
    if s.trainer is None and all(_idle_worker(s, w) for w in s.workers):
        return Verdict(Kind.IDLE, f"{main.label} waits for work: the trainer has not asked it for anything")
    still = f" and has not run for {time_text(main.still)}" if main.still else ""
    channel = f" (kernel wait {main.channel})" if main.channel else ""
    return Verdict(
        Kind.IDLE, f"{main.label} is {main.wait}{channel}{still}", f"see where: py-spy dump --pid {main.pid}"
    )
