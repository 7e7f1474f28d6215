"""The text of /proc, parsed: pure functions from a file's content to numbers.  Sizes in bytes, see proc(5)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

__all__ = [
    "DiskCounters",
    "FdInfo",
    "IoCounters",
    "Mapping",
    "Mount",
    "Pressure",
    "Syscall",
    "TaskStat",
    "parse_cgroup",
    "parse_diskstats",
    "parse_fdinfo",
    "parse_io",
    "parse_kilobytes",
    "parse_maps",
    "parse_mountinfo",
    "parse_pollfds",
    "parse_pressure",
    "parse_sched",
    "parse_smaps",
    "parse_sockets",
    "parse_stat",
    "parse_switches",
    "parse_syscall",
    "parse_table",
]

SECTOR = 512  # /proc/diskstats counts sectors of 512 bytes whatever the device's own size


@dataclass(frozen=True, slots=True)
class TaskStat:
    """``/proc/PID/stat`` or ``/proc/PID/task/TID/stat``; times in clock ticks."""

    pid: int
    name: str
    state: str
    parent: int
    minor_faults: int
    major_faults: int
    cpu_ticks: int
    threads: int
    started: int
    exit_code: int | None
    kernel: bool
    """A thread of the kernel (PF_KTHREAD)."""


def parse_stat(text: str) -> TaskStat:
    """Parse a stat line; the name in parentheses may itself hold parentheses and blanks."""
    left, right = text.index("("), text.rindex(")")
    rest = text[right + 2 :].split()
    return TaskStat(
        pid=int(text[:left]),
        name=text[left + 1 : right],
        state=rest[0],
        parent=int(rest[1]),
        minor_faults=int(rest[7]),
        major_faults=int(rest[9]),
        cpu_ticks=int(rest[11]) + int(rest[12]),
        threads=int(rest[17]),
        started=int(rest[19]),
        exit_code=int(rest[49]) if len(rest) > 49 else None,
        kernel=bool(int(rest[6]) & 0x00200000),
    )


@dataclass(frozen=True, slots=True)
class Syscall:
    """``/proc/PID/task/TID/syscall``: the number is None while running and -1 while blocked outside a system call."""

    number: int | None
    args: tuple[int, ...] = ()


def parse_syscall(text: str) -> Syscall:
    """Parse ``running``, ``-1 SP PC`` or ``NUMBER ARG1..ARG6 SP PC``."""
    parts = text.split()
    if not parts or parts[0] == "running":
        return Syscall(None)
    number = int(parts[0])
    return Syscall(number, tuple(int(p, 16) for p in parts[1:7]) if number >= 0 else ())


@dataclass(frozen=True, slots=True)
class IoCounters:
    """``/proc/PID/io``: ``rchar`` counts what read calls returned, ``read_bytes`` what storage delivered."""

    rchar: int
    read_bytes: int
    write_bytes: int
    read_calls: int


def parse_io(text: str) -> IoCounters:
    """Parse the ``name: value`` lines of an io file."""
    table = parse_table(text)
    return IoCounters(
        table.get("rchar", 0), table.get("read_bytes", 0), table.get("write_bytes", 0), table.get("syscr", 0)
    )


@dataclass(frozen=True, slots=True)
class FdInfo:
    """``/proc/PID/fdinfo/N``: file offset, open flags, id of the mount."""

    position: int
    flags: int
    mount: int

    @property
    def readable(self) -> bool:
        """Whether the descriptor was opened for reading (O_ACCMODE is not O_WRONLY, and no O_PATH)."""
        return self.flags & 3 != 1 and not self.flags & 0o10000000


def parse_fdinfo(text: str) -> FdInfo:
    """Parse the first lines of an fdinfo file (pos decimal, flags octal)."""
    values = {"pos": "0", "flags": "0", "mnt_id": "0"}
    for line in text.splitlines()[:3]:
        key, _, value = line.partition(":")
        values[key] = value.strip()
    return FdInfo(int(values["pos"]), int(values["flags"], 8), int(values["mnt_id"]))


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of ``/proc/PID/mountinfo``."""

    number: int
    device: tuple[int, int]
    point: str
    kind: str
    source: str

    @property
    def server(self) -> str | None:
        """The file server's name where the source has one: ``host:/export`` or ``//host/share``."""
        if self.source.startswith("//"):
            return self.source[2:].partition("/")[0]
        host, colon, _ = self.source.partition(":/")
        return host.strip("[]") if colon and host and "/" not in host else None


def _unescape(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def parse_mountinfo(text: str) -> dict[int, Mount]:
    """Parse mountinfo into mounts by id."""
    mounts = {}
    for line in text.splitlines():
        fields = line.split(" ")
        try:
            dash = fields.index("-", 6)
            major, _, minor = fields[2].partition(":")
            mount = Mount(
                number=int(fields[0]),
                device=(int(major), int(minor)),
                point=_unescape(fields[4]),
                kind=fields[dash + 1],
                source=_unescape(fields[dash + 2]),
            )
        except (ValueError, IndexError):
            continue
        mounts[mount.number] = mount
    return mounts


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """One line of ``/proc/diskstats``: bytes since boot, and milliseconds with at least one request in flight."""

    name: str
    device: tuple[int, int]
    read: int
    written: int
    busy_ms: int


def parse_diskstats(text: str) -> dict[str, DiskCounters]:
    """Parse diskstats into disks and partitions by name."""
    disks = {}
    for line in text.splitlines():
        f = line.split()
        if len(f) >= 14:
            disks[f[2]] = DiskCounters(f[2], (int(f[0]), int(f[1])), int(f[5]) * SECTOR, int(f[9]) * SECTOR, int(f[12]))
    return disks


@dataclass(frozen=True, slots=True)
class Pressure:
    """``/proc/pressure/*``: microseconds since boot in which some or all tasks waited for the resource."""

    some: int
    full: int


def parse_pressure(text: str) -> Pressure:
    """Parse the ``some``/``full`` lines of a pressure stall file."""
    totals = {"some": 0, "full": 0}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        total = rest.rpartition("total=")[2]
        if kind in totals and total.isdigit():
            totals[kind] = int(total)
    return Pressure(totals["some"], totals["full"])


def parse_table(text: str) -> dict[str, int]:
    """``name value`` or ``name: value`` lines (io, vmstat, memory.stat) as whole numbers."""
    table = {}
    for line in text.splitlines():
        parts = line.replace(":", " ", 1).split()
        if len(parts) >= 2 and parts[1].lstrip("-").isdigit():
            table[parts[0]] = int(parts[1])
    return table


def parse_kilobytes(text: str) -> dict[str, int]:
    """``Name: 12 kB`` lines (meminfo, smaps_rollup) in bytes."""
    table = {}
    for line in text.splitlines():
        parts = line.split()
        if len(parts) == 3 and parts[2] == "kB" and parts[1].isdigit():
            table[parts[0].rstrip(":")] = int(parts[1]) * 1024
    return table


def parse_switches(text: str) -> int | None:
    """Context switches of a task, from its status file: unchanged means that it never ran."""
    table = parse_table(text)
    if "voluntary_ctxt_switches" not in table:
        return None
    return table["voluntary_ctxt_switches"] + table.get("nonvoluntary_ctxt_switches", 0)


def parse_sched(text: str) -> float | None:
    """Seconds on the scheduler's clock at which the task last ran (``se.exec_start`` of its sched file)."""
    for line in text.splitlines():
        if line.startswith("se.exec_start"):
            return float(line.rpartition(":")[2]) / 1000
    return None


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapped file of ``/proc/PID/maps``; ``end`` is the file offset that its last mapping reaches."""

    path: str
    end: int
    executable: bool


def parse_maps(text: str) -> dict[str, Mapping]:
    """Parse maps into mapped files by path."""
    ends: dict[str, int] = {}
    executable: set[str] = set()
    for line in text.splitlines():
        at = line.find(" /")  # what stands before the path has no slash
        if at < 0:
            continue
        span, mode, offset = line[:at].split(maxsplit=3)[:3]
        path = line[at + 1 :]
        start, _, stop = span.partition("-")
        end = int(offset, 16) + int(stop, 16) - int(start, 16)
        ends[path] = max(ends.get(path, 0), end)
        if "x" in mode:
            executable.add(path)
    return {path: Mapping(path, end, path in executable) for path, end in ends.items()}


def parse_smaps(text: str) -> dict[str, int]:
    """Resident bytes of each mapped file of a smaps file, by path."""
    resident: dict[str, int] = {}
    path = ""
    for line in text.splitlines():
        head = line.split(maxsplit=5)
        if head and "-" in head[0] and not head[0].endswith(":"):
            path = head[5] if len(head) == 6 and head[5].startswith("/") else ""
        elif path and line.startswith("Rss:"):
            resident[path] = resident.get(path, 0) + int(head[1]) * 1024
    return resident


def parse_cgroup(text: str) -> tuple[str | None, str | None]:
    """The process's cgroup paths ``(v2, v1 memory controller)`` from ``/proc/PID/cgroup``."""
    unified = memory = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            unified = path
        elif "memory" in controllers.split(","):
            memory = path
    return unified, memory


def parse_sockets(text: str) -> dict[int, str]:
    """Peers ``address:port`` by socket inode, from ``/proc/PID/net/tcp`` or ``tcp6``."""
    peers = {}
    for line in text.splitlines()[1:]:
        f = line.split()
        if len(f) > 9:
            host, _, port = f[2].partition(":")
            peers[int(f[9])] = f"{_address(host)}:{int(port, 16)}"
    return peers


def _address(text: str) -> str:
    raw = bytes.fromhex(text)
    # The kernel prints each 32-bit word in the machine's byte order.
    words = struct.pack(f"{len(raw) // 4}I", *struct.unpack(f">{len(raw) // 4}I", raw))
    if len(words) == 4:
        return socket.inet_ntop(socket.AF_INET, words)
    if words.startswith(bytes(10) + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, words[12:])
    return f"[{socket.inet_ntop(socket.AF_INET6, words)}]"


def parse_pollfds(data: bytes) -> tuple[int, ...]:
    """The descriptors of an array of ``struct pollfd``."""
    return tuple(fd for fd, _, _ in struct.iter_unpack("ihh", data[: len(data) // 8 * 8]) if fd >= 0)
