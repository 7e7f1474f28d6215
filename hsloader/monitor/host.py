"""The machine that a process runs on: disks, memory, cgroup limit, /dev/shm, pressure."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from hsloader.monitor.access import Patience, system_text
from hsloader.monitor.procfs import (
    Mount,
    Pressure,
    parse_cgroup,
    parse_diskstats,
    parse_kilobytes,
    parse_pressure,
    parse_table,
)
from hsloader.monitor.samples import HostSample

__all__ = ["cgroup_memory", "disk_names", "pressure_share", "sample_host"]

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def sample_host(pid: int) -> HostSample:
    """Sample the machine as process ``pid`` sees it (its cgroup, its /dev/shm)."""
    patience = Patience()
    pressure = {}
    for name in ("cpu", "io", "memory"):
        text = system_text(f"/proc/pressure/{name}")
        if text:
            pressure[name] = parse_pressure(text)
    vmstat = parse_table(system_text("/proc/vmstat"))
    shm = patience.ask(0.5, lambda: _shared_memory(pid), None)
    patience.close()
    return HostSample(
        at=time.monotonic(),
        disks=parse_diskstats(system_text("/proc/diskstats")),
        memory=parse_kilobytes(system_text("/proc/meminfo")),
        pressure=pressure,
        refaults=vmstat.get("workingset_refault_file", vmstat.get("workingset_refault", 0)),
        shm=shm,
        cgroup=cgroup_memory(pid),
    )


def _shared_memory(pid: int) -> tuple[int, int] | None:
    for root in (f"/proc/{pid}/root", ""):
        try:
            found = os.statvfs(f"{root}/dev/shm")
        except OSError:
            continue
        return found.f_blocks * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize
    return None


def cgroup_memory(pid: int | str = "self") -> tuple[int, int, int] | None:
    """``(limit, used, kills)`` of the tightest memory cgroup of a process, None where none limits it.

    ``used`` leaves out the page cache that the kernel drops when memory is short; ``kills`` counts what its
    OOM killer ended.  Both cgroup versions; inside a container the path is tried from the root too, because the
    cgroup namespace hides the real one.
    """
    unified, memory = parse_cgroup(system_text(f"/proc/{pid}/cgroup"))
    tightest: tuple[int, int, int] | None = None
    for folder in _folders(_CGROUP, unified):
        tightest = _tighter(tightest, _limits(folder, "memory.max", "memory.current", "memory.events"))
    for folder in _folders(_CGROUP / "memory", memory):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
        tightest = _tighter(tightest, _limits(folder, *names))
    return tightest


def _folders(base: Path, path: str | None) -> Iterable[Path]:
    if path is None:
        return
    folder = base / path.lstrip("/")
    while True:
        yield folder
        if folder == base or base not in folder.parents:
            return
        folder = folder.parent


def _limits(folder: Path, limit_name: str, usage_name: str, events_name: str) -> tuple[int, int, int] | None:
    limit, usage = system_text(str(folder / limit_name)).strip(), system_text(str(folder / usage_name)).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= _UNLIMITED:
        return None
    cache = parse_table(system_text(str(folder / "memory.stat")))
    files = cache.get("total_inactive_file", cache.get("inactive_file", 0))
    files += cache.get("total_active_file", cache.get("active_file", 0))
    kills = parse_table(system_text(str(folder / events_name))).get("oom_kill", 0)
    return int(limit), max(0, int(usage) - files), kills


def _tighter(a: tuple[int, int, int] | None, b: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
    if a is None or b is None:
        return a or b
    return min(a, b, key=lambda found: found[0] - found[1])


def disk_names(devices: Iterable[tuple[int, int]], mounts: Iterable[Mount]) -> dict[tuple[int, int], str]:
    """The whole disk behind each device number; file systems with numbers of their own go by their mount's source."""
    sources = {m.device: m.source for m in mounts if m.source.startswith("/dev/")}
    names = {}
    for device in devices:
        folder = Path(f"/sys/dev/block/{device[0]}:{device[1]}")
        if not folder.exists() and device in sources:
            folder = Path("/sys/class/block") / Path(sources[device]).resolve().name
        if not folder.exists():
            continue
        real = folder.resolve()
        names[device] = real.parent.name if (real / "partition").exists() else real.name
    return names


def pressure_share(first: Pressure | None, last: Pressure | None, seconds: float) -> float | None:
    """Share of the time in which at least one task waited for the resource."""
    if first is None or last is None or seconds <= 0:
        return None
    return min(1.0, (last.some - first.some) / (seconds * 1e6))
