"""Verdicts on what stands still: stopped, dead, full, stuck, deadlocked.  Each looks at a situation."""

from __future__ import annotations

from hsloader.monitor.files import file_system_text
from hsloader.monitor.kernel import Wait
from hsloader.monitor.situation import READS, Kind, Situation, Verdict, idle_worker
from hsloader.monitor.summary import STORAGE_WAITS, FileReading
from hsloader.monitor.words import listed, plural, rate_text, share_text, size_text, time_text

__all__ = ["FAULTS", "exit_text"]


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
        rest_text = f"; the other {len(rest)} read at {rate_text(moving)}" if moving >= READS else ""
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


def _lost(s: Situation) -> Verdict | None:
    waits = s.data_wait
    if waits is None or waits < 0.95 or not all(idle_worker(s, w) for w in s.workers):
        return None
    return Verdict(
        Kind.LOST_MESSAGE,
        f"the trainer waits for its {plural(len(s.workers), 'worker')} and the workers wait for the trainer: a message "
        "between them was lost, as happens when a worker is killed while it holds the queue's lock",
        "restart the run; set timeout= on the DataLoader so that this ends in an error",
    )


FAULTS = (_stopped, _dead, _shm_full, _stuck, _deadlock, _lost)
