"""What this process may use of the machine: cores, memory, and its share of both beside the node's other ranks."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cpu_share", "default_budget", "memory_available", "memory_total", "ranks_on_node"]

_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63

# In the order of trust: torchrun, Slurm, Open MPI, MPICH.
_RANKS = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def ranks_on_node() -> int:
    """How many ranks of this job run on this machine, as far as the launcher says; else 1."""
    for name in _RANKS:
        text = os.environ.get(name, "").split("(")[0]  # Slurm also writes "8(x2)"
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return 1


def cpu_share(ranks: int | None = None) -> int:
    """Cores for this rank: the affinity mask or the cgroup's quota, whichever is less, over the node's ranks.

    A launcher that binds each rank to its own cores is recognised by a mask smaller than the machine (or than the
    cpuset of the container); that mask is then not divided again.
    """
    ranks = max(1, ranks_on_node() if ranks is None else ranks)
    machine = os.cpu_count() or 1
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    bound = ranks > 1 and mask * ranks <= (_cpuset() or machine)
    own = float(mask) if bound else mask / ranks
    quota = _cpu_quota()
    if quota is not None:
        own = min(own, quota / ranks)
    return max(1, int(own))


def memory_total() -> int:
    """Bytes of memory that this process could have at most: the machine's, or its cgroup's limit if that is less."""
    total = _meminfo().get("MemTotal", _NO_LIMIT)
    return min([total, *(limit for limit, _ in _memory_groups())])


def memory_available() -> int:
    """Bytes of memory that are still to be had: MemAvailable, or what the cgroup leaves if that is less.

    A cgroup's page cache counts as available: the kernel gives it back before it kills.
    """
    available = _meminfo().get("MemAvailable", _NO_LIMIT)
    return max(0, min([available, *(limit - used for limit, used in _memory_groups())]))


def default_budget(slot_bytes: int, loaders: int, slots: int) -> int:
    """Bytes of a ring nobody chose a size for: ``slots``, at most a quarter of what is available over ``loaders``.

    Never less than three slots, which is the least that works.
    """
    share = memory_available() // 4 // max(1, loaders)
    return max(3 * slot_bytes, min(slots * slot_bytes, share))


def _meminfo() -> dict[str, int]:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return _posix_memory()
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _posix_memory() -> dict[str, int]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return {}
    return {"MemTotal": total, "MemAvailable": total // 2}


def _own_groups() -> list[tuple[str, str]]:
    """This process's cgroups as (controllers, path); the controllers are empty for version 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    parts = [line.split(":", 2) for line in lines]
    return [(part[1], part[2]) for part in parts if len(part) == 3]


def _folders(controller: str) -> list[Path]:
    """The cgroup folders from this process's own up to the root, for a controller; both versions."""
    found = []
    for controllers, path in _own_groups():
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP
        if not controllers and not (root / "cgroup.controllers").exists():
            root = _CGROUP / "unified"
        folder = root / path.lstrip("/")
        # Inside a container the path may be the host's and not exist; the limits are then at the root.
        while True:
            if folder.is_dir():
                found.append(folder)
            if folder in (root, folder.parent):
                break
            folder = folder.parent
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _memory_groups() -> list[tuple[int, int]]:
    """(limit, bytes in use without page cache) of every cgroup around this process that has a limit."""
    found = []
    for folder in _folders("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < _NO_LIMIT:
                found.append((limit, max(0, used - _cache(folder))))
    return found


def _cache(folder: Path) -> int:
    """Bytes of file pages in a cgroup that are not of memory files (those cannot be given back)."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    numbers = {name: int(value) for name, _, value in (line.partition(" ") for line in lines) if value.isdecimal()}
    prefix = "total_" if "total_cache" in numbers else ""  # version 1 counts the groups below separately
    return sum(numbers.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))


def _cpuset() -> int | None:
    """Cores of the innermost cpuset around this process, or None."""
    for folder in _folders("cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            try:
                text = (folder / name).read_text().strip()
                ranges = [part.split("-") for part in text.split(",") if part]
                return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges) or None
            except (OSError, ValueError):
                continue
    return None


def _cpu_quota() -> float | None:
    """Cores that the tightest cgroup around this process allows, or None."""
    quotas = []
    for folder in _folders("cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
        except (OSError, ValueError):
            pass
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_us and period_us:
            quotas.append(quota_us / period_us)
    return min(quotas) if quotas else None
