"""``hsloader doctor``'s Python side: examine a process tree for two seconds and say what is the matter."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsloader.errors import HsloaderError
from hsloader.monitor.access import system_text
from hsloader.monitor.diagnosis import judge
from hsloader.monitor.faults import exit_text
from hsloader.monitor.host import pressure_share
from hsloader.monitor.kernel import Wait
from hsloader.monitor.pyspy import frames_of
from hsloader.monitor.roles import Group, Role, group_processes, is_python, roles_of
from hsloader.monitor.samples import Observation
from hsloader.monitor.sampling import observe
from hsloader.monitor.situation import HostReport, Kind, Situation, Verdict
from hsloader.monitor.summary import BusyThread, ProcessReport, summarise
from hsloader.monitor.words import plural, rate_text, share_text, size_text

__all__ = ["Examination", "conclude", "examine"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found: one verdict, the processes, the machine, warnings, and what could not be seen."""

    pid: int
    seconds: float
    verdict: Verdict
    processes: tuple[ProcessReport, ...]
    host: HostReport
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values; sizes in bytes, rates in bytes a second, times in seconds."""
        found: dict[str, Any] = _plain(self)
        for process in found["processes"]:
            del process["links"], process["main_links"]
        return found


def examine(pid: int, seconds: float = 2.0, *, batch_size: int | None = None, python: bool = True) -> Examination:
    """Examine process ``pid`` and its descendants: any PyTorch training run, with hsloader in it or not.

    Needs no privileges for processes of the same user.  Takes ``seconds``, and a full look at each process before and
    after; in between it uses at most a fifth of a core.

    Args:
        pid: the training process, its launcher (torchrun, srun, a shell) or one of its workers.
        seconds: how long to watch.
        batch_size: samples a batch, to say how long a batch takes (it cannot be seen from outside).
        python: ask py-spy, where installed, what busy threads execute.

    Raises:
        HsloaderError: this is not Linux, or ``pid`` is this process or a thread of the kernel.
        ProcessLookupError: there is no such process.
    """
    if not sys.platform.startswith("linux") or not Path("/proc/self/task").is_dir():
        raise HsloaderError(
            f"hsloader doctor reads /proc, which this system ({sys.platform}) does not have: it runs on Linux only; "
            f"elsewhere try: py-spy dump --pid {pid}"
        )
    observation = observe(pid, seconds)
    found = conclude(observation, batch_size=batch_size)
    return _with_frames(found) if python else found


def conclude(observation: Observation, *, batch_size: int | None = None) -> Examination:
    """The verdict on an observation; a pure function of it."""
    infos = [t.info for t in observation.tracks.values()]
    parent = observation.root_parent
    roles = roles_of(
        infos,
        on_gpu=frozenset(p for p, t in observation.tracks.items() if _opened_gpu(t.end.links.values())),
        launching=frozenset(
            p for p, t in observation.tracks.items() if t.end.threads and t.end.threads[0].wait is Wait.CHILD
        ),
        outside={parent.pid: parent} if parent else {},
    )
    groups = group_processes(infos, roles)
    labels = _labels(observation, groups, roles)
    reports = {p: summarise(observation, t, roles[p], labels[p]) for p, t in observation.tracks.items()}
    host = _host(observation)
    situations = [_situation(observation, host, group, reports, batch_size) for group in groups]
    verdict = _overall(observation, situations)
    shown = [Role.TRAINER, Role.WORKER, Role.FEEDER, Role.COMPILER, Role.LAUNCHER, Role.HELPER]
    ordered = sorted(reports.values(), key=lambda r: (shown.index(r.role), r.label, r.pid))
    return Examination(
        pid=observation.root,
        seconds=observation.seconds,
        verdict=verdict,
        processes=tuple(ordered),
        host=host,
        warnings=tuple(_warnings(host, ordered)),
        notes=tuple(_notes(observation, roles)),
    )


def _opened_gpu(links: Iterable[str]) -> bool:
    return any((link.startswith("/dev/nvidia") and link[11:].isdigit()) or link == "/dev/kfd" for link in links)


def _labels(observation: Observation, groups: list[Group], roles: Mapping[int, Role]) -> dict[int, str]:
    labels = {}
    several = len([g for g in groups if g.trainer is not None]) > 1
    for group in groups:
        if group.trainer is not None:
            rank = observation.tracks[group.trainer].info.rank
            name = f"rank {rank}" if several and rank is not None else _name(observation, group.trainer)
            labels[group.trainer] = f"{name} (pid {group.trainer})"
        for number, pid in enumerate(group.workers):
            labels[pid] = f"worker {number} (pid {pid})"
        for pid in group.feeders:
            labels[pid] = f"hsloader's feeder (pid {pid})"
    for pid, track in observation.tracks.items():
        if pid not in labels:
            command = track.info.command
            program = Path(command[0]).name if command else track.info.name
            if roles[pid] is Role.COMPILER and program.startswith("python"):
                program = "compile worker"
            labels[pid] = program
    return labels


def _name(observation: Observation, pid: int) -> str:
    info = observation.tracks[pid].info
    return "the training process" if is_python(info) else info.name


def _situation(
    observation: Observation,
    host: HostReport,
    group: Group,
    reports: Mapping[int, ProcessReport],
    batch_size: int | None,
) -> Situation:
    members = [p for p in (group.trainer, *group.workers) if p is not None]  # inside workers each has its own ring
    return Situation(
        seconds=observation.seconds,
        host=host,
        trainer=reports[group.trainer] if group.trainer is not None else None,
        workers=[reports[p] for p in group.workers],
        compilers=[reports[p] for p in group.compilers],
        feeders=[reports[p] for p in group.feeders],
        ring=next((observation.rings[p] for p in members if p in observation.rings), None),
        disk_of=observation.disk_of,
        batch_size=batch_size,
    )


def _overall(observation: Observation, situations: list[Situation]) -> Verdict:
    root = observation.tracks.get(observation.root)
    if root is None or root.last is None:
        return Verdict(Kind.ENDED, f"process {observation.root} ended while it was watched")
    if root.last.stat.state in "ZX":
        return Verdict(
            Kind.ENDED,
            f"process {observation.root} has ended{exit_text(root.last.stat.exit_code)}; only its parent "
            f"({root.info.parent}) has not collected it yet",
        )
    verdicts = [judge(s) for s in situations]
    worst = min(verdicts, key=lambda v: v.kind.severity)
    same = sum(v.kind is worst.kind for v in verdicts)
    if len(verdicts) == 1:
        return worst
    trainer = situations[verdicts.index(worst)].trainer
    where = trainer.label if trainer else "workers without a trainer"
    sentence = worst.sentence if worst.sentence.startswith(where) else f"{where}: {worst.sentence}"
    more = f"; the same in {same} of {len(verdicts)} training processes" if same > 1 else ""
    return dataclasses.replace(worst, sentence=sentence + more)


def _host(observation: Observation) -> HostReport:
    first, last = observation.first, observation.last
    span = max(last.at - first.at, 1e-9)
    disks = {}
    for name, disk in last.disks.items():
        before = first.disks.get(name)
        if before is not None and name in observation.disk_of.values():
            busy = min(1.0, (disk.busy_ms - before.busy_ms) / 1000 / span)
            disks[name] = busy, (disk.read - before.read) / span
    pressure = {}
    for kind in last.pressure:
        share = pressure_share(first.pressure.get(kind), last.pressure[kind], span)
        if share is not None:
            pressure[kind] = share
    return HostReport(
        cpus=observation.cpus,
        disks=disks,
        memory_total=last.memory.get("MemTotal", 0),
        memory_available=last.memory.get("MemAvailable", 0),
        shm_size=last.shm[0] if last.shm else 0,
        shm_used=last.shm[1] if last.shm else 0,
        cgroup_memory=last.cgroup,
        refault_rate=max(0, last.refaults - first.refaults) * _PAGE / span,
        pressure=pressure,
        gpus=tuple(observation.gpus) if observation.gpus else None,
    )


def _warnings(host: HostReport, reports: list[ProcessReport]) -> Iterable[str]:
    if host.cgroup_memory:
        limit, used, kills = host.cgroup_memory
        if kills:
            yield f"the OOM killer has ended {plural(kills, 'process', 'processes')} of this cgroup"
        if used > 0.9 * limit:
            worst = max(reports, key=lambda r: r.oom_score or 0, default=None)
            first = f"; the kernel would kill {worst.label} first" if worst and worst.oom_score else ""
            yield (
                f"memory is nearly full: {size_text(used)} of the cgroup's {size_text(limit)} without page cache{first}"
            )
    if host.memory_total and host.memory_available < 0.05 * host.memory_total:
        yield f"memory is nearly full: {size_text(host.memory_available)} of {size_text(host.memory_total)} are left"
    if host.shm_size and host.shm_used > 0.8 * host.shm_size:
        yield (
            f"/dev/shm is {share_text(host.shm_used / host.shm_size)} full ({size_text(host.shm_used)} of "
            f"{size_text(host.shm_size)}): workers die with a bus error when it is"
        )
    read = sum(r.disk_rate for r in reports)
    if read > 10e6 and host.refault_rate > max(20e6, 0.3 * read):
        yield (
            f"the page cache thrashes: {rate_text(host.refault_rate)} are read that had been dropped from it a moment "
            "before; the data do not fit memory, read them in larger pieces or with O_DIRECT"
        )
    if host.pressure.get("cpu", 0.0) > 0.5:
        yield (
            f"tasks waited for a core {share_text(host.pressure['cpu'])} of the time: more wants to run on this "
            f"machine than its {plural(host.cpus, 'core')} can do"
        )
    if host.pressure.get("memory", 0.0) > 0.2:
        yield f"tasks waited for memory {share_text(host.pressure['memory'])} of the time (memory pressure)"


def _notes(observation: Observation, roles: Mapping[int, Role]) -> Iterable[str]:
    root = observation.tracks.get(observation.root)
    if root is not None and roles.get(observation.root) is Role.WORKER:
        yield (
            f"process {observation.root} is a worker; to see the trainer and all its workers: "
            f"hsloader doctor {root.info.parent}"
        )
    if observation.gpu_note:
        yield observation.gpu_note
    foreign = {p for p, t in observation.tracks.items() if t.info.uid != os.geteuid()}
    refused = {kind: pids for kind, pids in observation.refused.items() if pids & set(observation.tracks)}
    if foreign and os.geteuid() != 0 and refused:
        yield (
            f"{plural(len(foreign), 'process', 'processes')} of another user: the kernel hides their files, system "
            "calls and I/O counters; run doctor as that user or as root"
        )
    elif {"fd", "io"} & set(refused):
        yield (
            "files and I/O counters are hidden although the user is the same: the process is marked not dumpable "
            "(it changed user, or its program file is not readable); run doctor as root"
        )
    elif "syscall" in refused:
        scope = system_text("/proc/sys/kernel/yama/ptrace_scope").strip()
        yield "system calls are not shown: " + (
            f"Yama lets only a parent trace (ptrace_scope is {scope}); files, positions and rates are seen; "
            "for more run doctor as root or set kernel.yama.ptrace_scope to 0"
            if scope not in ("", "0")
            else "a security module or the container's rules refuse tracing; files, positions and rates are seen"
        )
    if observation.locked:
        yield (
            f"the memory map of {plural(len(observation.locked), 'process', 'processes')} is locked by a thread stuck "
            "in the kernel: command line, maps and arguments of system calls could not be read"
        )
    for number in sorted(observation.silent_mounts):
        mount = observation.mounts.get(number)
        if mount is not None:
            yield f"{mount.point} ({mount.kind} from {mount.source}) did not answer within half a second"


def _with_frames(found: Examination) -> Examination:
    busiest = sorted((p for p in found.processes if p.busy_threads), key=lambda p: -p.cpu)
    busiest = [p for p in busiest if p.role in (Role.TRAINER, Role.WORKER, Role.FEEDER)][:3]
    processes = {p.pid: p for p in found.processes}
    notes = list(found.notes)
    for process in busiest:
        frames, reason = frames_of(process.pid)
        if reason:
            notes.append(reason)
            break
        threads = tuple(BusyThread(t.tid, t.name, t.cpu, frames.get(t.tid, ())) for t in process.busy_threads)
        processes[process.pid] = dataclasses.replace(process, busy_threads=threads)
    return dataclasses.replace(found, processes=tuple(processes.values()), notes=tuple(notes))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, (Wait, Role, Kind)) else value
