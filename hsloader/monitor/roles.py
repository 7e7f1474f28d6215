"""Which process of a tree is what: launcher, trainer, DataLoader worker, compiler."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from hsloader.monitor.samples import ProcessInfo

__all__ = ["Group", "Role", "group_processes", "is_python", "roles_of"]


class Role(StrEnum):
    """What a process of the tree does."""

    LAUNCHER = "launcher"
    TRAINER = "trainer"
    WORKER = "worker"
    FEEDER = "feeder"
    COMPILER = "compiler"
    HELPER = "helper"


@dataclass(slots=True)
class Group:
    """One training process and what belongs to it; ``trainer`` is None where only workers were given."""

    trainer: int | None
    workers: list[int] = field(default_factory=list)
    compilers: list[int] = field(default_factory=list)
    feeders: list[int] = field(default_factory=list)


_COMPILERS = frozenset({
    "cc", "cc1", "cc1plus", "gcc", "g++", "c++", "clang", "clang++", "clang-cpp", "ptxas", "nvcc", "cicc",
    "cudafe++", "nvlink", "fatbinary", "as", "ld", "ld.lld", "lld", "collect2", "ninja", "lto1", "lto-wrapper",
    "hipcc", "icx", "icpx",
})  # fmt: skip
_VERSIONED = re.compile(r"(?:x86_64-linux-gnu-|aarch64-linux-gnu-)?(gcc|g\+\+|clang|clang\+\+|cpp|as|ld)(?:-\d+)?\Z")
_COMPILE_WORKER = ("torch/_inductor/compile_worker", "torch._inductor.compile_worker")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun", "uv", "sh", "bash", "dash", "zsh", "tmux")
_LAUNCH_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch/distributed/run.py")
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "multiprocessing.managers")
_OWN = "hsloader._launch"  # how hsloader starts its children: the feeder, the conversion workers


def roles_of(
    processes: Iterable[ProcessInfo],
    on_gpu: frozenset[int] = frozenset(),
    launching: frozenset[int] = frozenset(),
    outside: Mapping[int, ProcessInfo] | None = None,
) -> dict[int, Role]:
    """The role of every process of a tree.

    Args:
        processes: the tree.
        on_gpu: processes that opened a GPU themselves; ``torch.multiprocessing.spawn`` starts trainers in the same
            way as DataLoader workers, and this tells them apart.
        launching: processes whose main thread waits for a child process: a Python child of theirs trains.
        outside: the parent of the tree's root, so that a worker given as root is recognised.
    """
    known = {p.pid: p for p in processes}
    everyone = {**(outside or {}), **known}
    named = any(p.name == "pt_data_worker" for p in known.values())
    roles: dict[int, Role] = {}
    for process in sorted(known.values(), key=lambda p: (p.started, p.pid)):
        parent = everyone.get(process.parent)
        role = _role(process, parent, named, on_gpu)
        above = roles.get(process.parent)
        if above is Role.COMPILER:
            role = Role.COMPILER  # inductor forks its compile workers from one another and calls compilers by shells
        elif role is Role.TRAINER and above is Role.TRAINER:
            if process.parent in launching:
                roles[process.parent] = Role.LAUNCHER
            elif process.pid not in on_gpu:
                role = Role.HELPER
        roles[process.pid] = role
    for process in known.values():
        # Whatever has DataLoader workers of its own trains.
        above = roles.get(process.parent)
        served = above is not None and "multiprocessing.forkserver" in " ".join(known[process.parent].command)
        if process.name == "pt_data_worker" and above in (Role.HELPER, Role.WORKER) and not served:
            roles[process.parent] = Role.TRAINER
    if known and not {Role.TRAINER, Role.WORKER} & set(roles.values()):
        roles[max(known.values(), key=lambda p: p.age).pid] = Role.TRAINER
    return roles


def _role(process: ProcessInfo, parent: ProcessInfo | None, named: bool, on_gpu: frozenset[int]) -> Role:
    command = process.command
    program = Path(command[0]).name if command else process.name
    line = " ".join(command[:8])
    if program in _COMPILERS or _VERSIONED.match(program) or any(mark in line for mark in _COMPILE_WORKER):
        return Role.COMPILER
    if process.name == "pt_data_worker":
        return Role.WORKER
    if _OWN in line:
        return Role.FEEDER if "hsloader.reader" in line else Role.WORKER
    if "--multiprocessing-fork" in command:
        return Role.TRAINER if process.pid in on_gpu or named else Role.WORKER
    if parent is not None and is_python(parent):
        # A fork without exec keeps the command line; the dead have none and are known by their name.
        forked = command == parent.command if command else process.name == parent.name
        if forked:
            return Role.HELPER if named else Role.WORKER
    if any(mark in line for mark in _HELPERS):
        return Role.HELPER
    if any(mark in line for mark in _LAUNCH_MODULES) or _starts(command, _LAUNCHERS):
        return Role.LAUNCHER
    return Role.TRAINER if is_python(process) else Role.HELPER


def is_python(process: ProcessInfo) -> bool:
    """Whether a process runs a Python interpreter, by its program or its name."""
    program = Path(process.command[0]).name if process.command else process.name
    return program.startswith(("python", "pypy")) or process.name.startswith(("python", "pt_"))


def _starts(command: tuple[str, ...], programs: tuple[str, ...]) -> bool:
    # torchrun and accelerate are Python scripts: the second word is their path.
    return any(Path(word).name in programs for word in command[:2])


def group_processes(processes: Iterable[ProcessInfo], roles: Mapping[int, Role]) -> list[Group]:
    """One group for each trainer, with the workers, feeders and compilers that descend from it."""
    known = {p.pid: p for p in processes}
    groups = {pid: Group(pid) for pid in sorted(known) if roles[pid] is Role.TRAINER}
    orphans = Group(None)
    for pid in sorted(known, key=lambda p: (known[p].started, p)):
        group = groups.get(_trainer_above(pid, known, roles) or 0, orphans)
        if roles[pid] is Role.WORKER:
            group.workers.append(pid)
        elif roles[pid] is Role.COMPILER:
            group.compilers.append(pid)
        elif roles[pid] is Role.FEEDER:
            group.feeders.append(pid)
    found = list(groups.values())
    return [*found, orphans] if orphans.workers or not found else found


def _trainer_above(pid: int, known: Mapping[int, ProcessInfo], roles: Mapping[int, Role]) -> int | None:
    while pid in known:
        pid = known[pid].parent
        if roles.get(pid) is Role.TRAINER:
            return pid
    return None
