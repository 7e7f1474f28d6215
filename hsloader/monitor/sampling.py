"""Watches a process tree through /proc: a full sample first and last, many short glances between."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from hsloader.errors import HsloaderError
from hsloader.monitor.access import ProcAccess, processes, system_text
from hsloader.monitor.files import is_data_file, is_remote, mount_of
from hsloader.monitor.gpu import GpuReader
from hsloader.monitor.host import disk_names, sample_host
from hsloader.monitor.kernel import syscall_name
from hsloader.monitor.neighbours import find_rings
from hsloader.monitor.procfs import (
    FdInfo,
    IoCounters,
    Mapping,
    Mount,
    Syscall,
    TaskStat,
    parse_fdinfo,
    parse_io,
    parse_kilobytes,
    parse_maps,
    parse_mountinfo,
    parse_pollfds,
    parse_sched,
    parse_smaps,
    parse_sockets,
    parse_stat,
    parse_switches,
    parse_syscall,
    parse_table,
)
from hsloader.monitor.samples import FileSeen, Glance, Observation, ProcessInfo, ProcessSample, ThreadSample, Track

__all__ = ["observe"]

_TICK = 0.05  # seconds between glances
_LOAD = 0.2  # a glance may use this share of a core; slower machines glance less often
_FIND_NEW = 0.4  # seconds between searches for new child processes
_LOOK_AT_MAPS = 0.25  # seconds between looks at the mapped files
_MOST_THREADS = 16  # threads of a process that a glance looks at
_YOUNG = 5.0  # seconds of age up to which a process may just have been forked and not yet be what it will be
_LARGE = 64 << 30  # resident bytes above which smaps_rollup is not read: walking the page tables would disturb
_MOST_ROLLUPS = 32  # processes up to which it is read: it takes 3 to 6 ms each

_FD_FIRST = frozenset({
    "read", "pread64", "readv", "preadv", "preadv2", "write", "pwrite64", "writev", "pwritev", "pwritev2",
    "recvfrom", "recvmsg", "recvmmsg", "accept", "accept4", "connect", "sendto", "sendmsg", "fsync", "fdatasync",
    "fstat", "getdents", "getdents64", "epoll_wait", "epoll_pwait", "epoll_pwait2", "flock", "fcntl", "readahead",
    "ioctl", "close", "ftruncate",
})  # fmt: skip
_FD_SECOND = frozenset({"sendfile"})
_PATH_FIRST = frozenset({"open", "stat", "lstat", "access", "readlink"})
_PATH_SECOND = frozenset(["openat", "openat2", "newfstatat", "statx", "faccessat", "faccessat2", "readlinkat"])
_OFFSET_FOURTH = frozenset({"pread64", "preadv", "preadv2"})


def observe(pid: int, seconds: float = 2.0) -> Observation:
    """Watch process ``pid`` (or the one that this thread belongs to) and its descendants for ``seconds``.

    Raises:
        ProcessLookupError: there is no such process, or /proc hides it.
        HsloaderError: it is this process, or a thread of the kernel.
    """
    access = ProcAccess()
    try:
        return _Observer(pid, access).run(seconds)
    finally:
        access.close()


class _Observer:
    def __init__(self, root: int, access: ProcAccess) -> None:
        self.access = access
        self.tracks: dict[int, Track] = {}
        self.mounts: dict[int, Mount] = {}
        self.status: dict[tuple[int, str], tuple[int, str, tuple[int, int]]] = {}
        self.polled: dict[int, tuple[Syscall, tuple[int, ...]]] = {}
        self.maps: dict[int, tuple[str, dict[str, Mapping]]] = {}
        self.ended = False
        if (root_stat := self.access.text(root, "stat")) is None:
            raise ProcessLookupError(
                f"no process {root} in /proc: it has ended, runs in another container, or /proc is mounted with hidepid"
            )
        # Tools that list threads show ids that /proc takes for processes of their own.
        self.root = parse_table(self.access.text(root, "status") or "").get("Tgid", root)
        task = parse_stat(root_stat)
        if self.root == os.getpid():
            raise HsloaderError(f"process {root} is the one that asks: examine it from another process")
        if task.kernel:
            raise HsloaderError(
                f"process {root} ({task.name}) is a thread of the kernel, which runs no program; give the id of the "
                "training process"
            )
        self.mounts = parse_mountinfo(self.access.text(root, "mountinfo") or "")
        self.parent = self._info(task.parent)

    def run(self, seconds: float) -> Observation:
        gpus = GpuReader()
        first = sample_host(self.root)
        self._find_processes()
        rings = find_rings(self.tracks)
        start = now = time.monotonic()
        find_next, maps_next = start + _FIND_NEW, start
        while now < start + seconds and not self.ended:
            began = self._spent()
            maps = now >= maps_next
            if maps:
                maps_next = now + _LOOK_AT_MAPS
                gpus.sample()
            for track in self.tracks.values():
                self._glance(track, maps)
            if now >= find_next:
                find_next = now + _FIND_NEW
                self._find_processes()
            pause = max(_TICK, (self._spent() - began) / _LOAD)
            time.sleep(max(0.0, min(pause - (time.monotonic() - now), start + seconds - time.monotonic())))
            now = time.monotonic()
        for track in self.tracks.values():
            track.last = self._full(track.info, final=True)
            if track.first.at > start or track.info.age < _YOUNG:
                track.info = self._info(track.info.pid) or track.info  # a fork may have become another program since
        last = sample_host(self.root)
        later = {ring.key: ring for ring in find_rings(self.tracks)} if rings else {}
        devices = {f.device for t in self.tracks.values() for g in t.glances for f in g.files}
        devices |= {m.device for m in self.mounts.values()}
        found, note = gpus.result()
        return Observation(
            root=self.root,
            seconds=time.monotonic() - start,
            began=start,
            tracks=self.tracks,
            first=first,
            last=last,
            mounts=self.mounts,
            disk_of=disk_names(devices, self.mounts.values()),
            peers=self._peers(),
            rings={r.owner: (r.snapshot, later[r.key].snapshot) for r in rings if r.key in later},
            gpus=found,
            gpu_note=note,
            cpus=len(os.sched_getaffinity(0)),
            ticks_per_second=os.sysconf("SC_CLK_TCK"),
            root_parent=self.parent,
            refused={kind: frozenset(pids) for kind, pids in self.access.refused.items()},
            locked=frozenset(self.access.locked),
            silent_mounts=frozenset(self.access.silent_mounts),
        )

    def _spent(self) -> float:
        return time.thread_time() + self.access.patience.spent

    # Processes

    def _find_processes(self) -> None:
        children: dict[int, list[int]] = {}
        for pid in processes():
            text = self.access.text(pid, "stat")
            if text is not None:
                children.setdefault(parse_stat(text).parent, []).append(pid)
        waiting = [self.root]
        while waiting:
            pid = waiting.pop()
            if pid == os.getpid():
                continue
            waiting += children.get(pid, [])
            if pid in self.tracks:
                continue
            info = self._info(pid)
            sample = self._full(info) if info else None
            if info and sample:
                self.tracks[pid] = Track(info, sample)

    def _info(self, pid: int) -> ProcessInfo | None:
        text = self.access.text(pid, "stat")
        if text is None:
            return None
        task = parse_stat(text)
        try:
            uid = Path(f"/proc/{pid}").stat().st_uid
        except OSError:
            return None
        command = (self.access.memory_text(pid, "cmdline") or "").rstrip("\0")
        rank = None
        for item in (self.access.memory_text(pid, "environ") or "").split("\0"):
            key, _, value = item.partition("=")
            if key == "RANK" and value.isascii() and value.isdigit():
                rank = int(value)
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - task.started / os.sysconf("SC_CLK_TCK")
        return ProcessInfo(
            pid=pid,
            parent=task.parent,
            uid=uid,
            name=task.name,
            command=tuple(command.split("\0")) if command else (),
            started=task.started,
            age=age,
            rank=rank,
        )

    def _full(self, info: ProcessInfo, final: bool = False) -> ProcessSample | None:
        pid = info.pid
        text = self.access.text(pid, "stat")
        if text is None or (task := parse_stat(text)).started != info.started:
            return None
        links = self.access.links(pid)
        threads = tuple(self._threads(pid, self._thread_ids(pid), links, full=True))
        io = self.access.text(pid, "io")
        score = self.access.text(pid, "oom_score")
        return ProcessSample(
            at=time.monotonic(),
            stat=task,
            threads=threads,
            links=links,
            io=_io(io),
            memory=self._memory(pid, final),
            oom_score=int(score) if score and score.strip().isdigit() else None,
            mapped=self._mapped(pid, task) if task.state not in "ZX" else {},
        )

    def _memory(self, pid: int, final: bool) -> dict[str, int]:
        memory = parse_kilobytes(self.access.text(pid, "status") or "")
        resident = memory.get("VmRSS", 0)
        few = len(self.tracks) <= _MOST_ROLLUPS
        if final and few and 0 < resident < _LARGE and (rollup := self.access.memory_text(pid, "smaps_rollup")):
            memory["Pss"] = parse_kilobytes(rollup).get("Pss", resident)
        return memory

    def _mapped(self, pid: int, task: TaskStat) -> dict[str, int]:
        data = {m.path for m in self._data_maps(pid)}
        if not data:
            return {}
        smaps = parse_smaps(self.access.memory_text(pid, "smaps", patience=1.0) or "")
        return {path: smaps[path] for path in data if path in smaps}

    def _data_maps(self, pid: int) -> Iterable[Mapping]:
        """The mapped files that may be data."""
        text = self.access.memory_text(pid, "maps") or ""
        known = self.maps.get(pid)
        if known is None or known[0] != text:
            known = self.maps[pid] = text, parse_maps(text)
        return (m for m in known[1].values() if is_data_file(m.path, mapped=True) and not m.executable)

    # Threads

    def _thread_ids(self, pid: int) -> list[int]:
        try:
            return sorted((int(t) for t in os.listdir(f"/proc/{pid}/task")), key=lambda t: (t != pid, t))
        except OSError:
            return []

    def _threads(self, pid: int, tids: Iterable[int], links: dict[int, str], full: bool) -> Iterable[ThreadSample]:
        own_clock = parse_sched(system_text("/proc/thread-self/sched")) if full else None
        for tid in tids:
            text = self.access.text(pid, "stat", tid)
            if text is None:
                continue
            task = parse_stat(text)
            raw = self.access.text(pid, "syscall", tid) if task.state not in "ZX" else None
            call = parse_syscall(raw) if raw else None
            fds, path, offset = self._arguments(pid, tid, call)
            idle = None
            if own_clock is not None and task.state != "R":
                ran = parse_sched(self.access.text(pid, "sched", tid) or "")
                idle = max(0.0, own_clock - ran) if ran else None
            yield ThreadSample(
                tid=tid,
                name=task.name,
                state=task.state,
                cpu_ticks=task.cpu_ticks,
                channel=(self.access.text(pid, "wchan", tid) or "").strip(),
                call=call,
                links=tuple(links[fd] for fd in fds if fd in links),
                path=path,
                fd=fds[0] if fds else None,
                offset=offset,
                switches=parse_switches(self.access.text(pid, "status", tid) or "") if full else None,
                idle=idle,
            )

    def _arguments(self, pid: int, tid: int, call: Syscall | None) -> tuple[tuple[int, ...], str | None, int | None]:
        """The descriptors, the path and the file offset that a system call names."""
        name = syscall_name(call)
        if call is None or name is None or not call.args:
            return (), None, None
        args = call.args
        if name in _FD_FIRST:
            return (args[0] & 0xFFFFFFFF,), None, args[3] if name in _OFFSET_FOURTH else None
        if name in _FD_SECOND:
            return (args[1] & 0xFFFFFFFF,), None, None
        if name in ("poll", "ppoll") and 0 < args[1] <= 64:
            known = self.polled.get(tid)
            if known is None or known[0] != call:
                known = self.polled[tid] = call, parse_pollfds(self.access.memory(pid, args[0], 8 * args[1]))
            return known[1], None, None
        if name in _PATH_FIRST or name in _PATH_SECOND:
            return (), self._path_argument(pid, args, at=name in _PATH_SECOND), None
        return (), None, None

    def _path_argument(self, pid: int, args: tuple[int, ...], at: bool) -> str | None:
        path = self.access.text_at(pid, args[1 if at else 0])
        if path is None or path.startswith("/"):
            return path
        # Relative to the working folder (AT_FDCWD is negative) or to a folder that is open.
        folder = f"fd/{args[0]}" if at and args[0] < 1 << 31 else "cwd"
        try:
            return os.path.normpath(os.path.join(os.readlink(f"/proc/{pid}/{folder}"), path))
        except OSError:
            return path

    # Glances

    def _glance(self, track: Track, maps: bool) -> None:
        pid = track.info.pid
        text = self.access.text(pid, "stat")
        if text is None or (task := parse_stat(text)).started != track.info.started:
            self.ended = self.ended or pid == self.root
            return
        self.ended = self.ended or (pid == self.root and task.state in "ZX")
        links = self.access.links(pid) if task.state not in "ZX" else {}
        files = [f for fd, path in links.items() if fd > 2 and (f := self._file(pid, fd, path))]
        tids = self._thread_ids(pid)
        if len(tids) > _MOST_THREADS:
            restless = [t.tid for t in track.first.threads if t.state in "RD" or t.name.startswith("pt_data")]
            tids = list(dict.fromkeys([pid, *restless, *tids[1:]]))[:_MOST_THREADS]
        threads = tuple(self._threads(pid, tids, links, full=False))
        if maps:
            files += self._mapped_files(pid)
        track.glances.append(Glance(time.monotonic(), threads, tuple(files)))

    def _file(self, pid: int, fd: int, path: str) -> FileSeen | None:
        if not is_data_file(path):
            return None
        text = self.access.text(pid, f"fdinfo/{fd}")
        info = parse_fdinfo(text) if text else None
        if info is None or not info.readable:
            return None
        key = info.mount, path
        status = self.status.get(key) or self._status(pid, fd, info)
        if self.access.link(pid, fd) != path:  # closed since, and its number may be another file's by now
            return None
        if status is None:
            mount = self.mounts.get(info.mount)
            return FileSeen(fd, path, info.position, info.mount, device=mount.device if mount else (0, 0))
        self.status[key] = status
        size, kind, device = status
        return FileSeen(fd, path, info.position, info.mount, size, kind, device) if kind != "folder" else None

    def _status(self, pid: int, fd: int, info: FdInfo) -> tuple[int, str, tuple[int, int]] | None:
        mount = self.mounts.get(info.mount)
        found = self.access.stat_open_file(pid, fd, info.mount, mount is None or is_remote(mount.kind))
        if found is None:
            return None
        kinds = {stat.S_IFIFO: "fifo", stat.S_IFDIR: "folder", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
        device = os.major(found.st_dev), os.minor(found.st_dev)
        return found.st_size, kinds.get(stat.S_IFMT(found.st_mode), "file"), device

    def _mapped_files(self, pid: int) -> Iterable[FileSeen]:
        for mapping in self._data_maps(pid):
            mount = mount_of(mapping.path, self.mounts.values())
            yield FileSeen(-1, mapping.path, 0, mount.number if mount else 0, mapping.end)

    def _peers(self) -> dict[int, str]:
        peers: dict[int, str] = {}
        for name in ("net/tcp", "net/tcp6"):
            peers |= parse_sockets(self.access.text(self.root, name) or "")
        return peers


def _io(text: str | None) -> IoCounters | None:
    return parse_io(text) if text else None
