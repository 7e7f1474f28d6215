"""What a thread waits for, from its state letter, system call and kernel wait channel."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from enum import StrEnum

from hsloader.monitor.procfs import Syscall

__all__ = ["Wait", "is_storage_wait", "syscall_name", "wait_of"]


class Wait(StrEnum):
    """What a thread is doing, as ``hsloader doctor`` prints it."""

    RUNNING = "running"
    READ = "reading a file"
    FAULT = "reading a mapped file"
    OPEN = "opening a file"
    WRITE = "writing a file"
    DISK = "in the kernel for storage"
    PIPE = "waiting for a pipe"
    FULL_PIPE = "writing to a full pipe"
    POLL = "waiting for a message"
    ACCEPT = "waiting to be called"
    SOCKET = "waiting for the network"
    LOCK = "waiting for a lock"
    TIMED_LOCK = "waiting for a lock, with a time limit"
    SLEEP = "sleeping"
    CHILD = "waiting for a child process"
    DRIVER = "in a device driver"
    STOPPED = "stopped"
    TRACED = "stopped by a debugger"
    ZOMBIE = "dead"
    OTHER = "waiting"


_READS = ("read", "pread64", "readv", "preadv", "preadv2", "sendfile", "splice", "copy_file_range", "readahead")
_ASYNC_READS = ("io_uring_enter", "io_getevents", "io_pgetevents")
_WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "fsync", "fdatasync", "msync", "ftruncate", "sync")
_OPENS = (
    "open", "openat", "openat2", "stat", "lstat", "fstat", "newfstatat", "statx", "access", "faccessat", "faccessat2",
    "getdents", "getdents64", "readlink", "readlinkat", "close",
)  # fmt: skip
_POLLS = ("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2")
_SOCKETS = ("recvfrom", "recvmsg", "recvmmsg", "connect", "sendto", "sendmsg")
_ACCEPTS = ("accept", "accept4")  # a server thread that nobody has called, as torch keeps one in every worker
_SLEEPS = ("nanosleep", "clock_nanosleep", "pause", "rt_sigsuspend", "rt_sigtimedwait")
_CHILDREN = ("wait4", "waitid")

_X86_64 = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 9: "mmap",
    11: "munmap", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 21: "access", 23: "select",
    24: "sched_yield", 26: "msync", 28: "madvise", 34: "pause", 35: "nanosleep", 40: "sendfile", 42: "connect",
    43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 56: "clone", 57: "fork", 59: "execve",
    61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 78: "getdents",
    89: "readlink", 128: "rt_sigtimedwait", 130: "rt_sigsuspend", 162: "sync", 187: "readahead", 202: "futex",
    208: "io_getevents", 217: "getdents64", 221: "fadvise64", 230: "clock_nanosleep", 232: "epoll_wait",
    247: "waitid", 257: "openat", 262: "newfstatat", 267: "readlinkat", 269: "faccessat", 270: "pselect6",
    271: "ppoll", 275: "splice", 281: "epoll_pwait", 288: "accept4", 295: "preadv", 296: "pwritev",
    299: "recvmmsg", 326: "copy_file_range", 327: "preadv2", 328: "pwritev2", 332: "statx",
}  # fmt: skip
_GENERIC = {  # arm64, riscv64, loongarch64: the table of asm-generic/unistd.h
    4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 46: "ftruncate", 48: "faccessat",
    56: "openat", 57: "close", 61: "getdents64", 63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64",
    68: "pwrite64", 69: "preadv", 70: "pwritev", 71: "sendfile", 72: "pselect6", 73: "ppoll", 76: "splice",
    78: "readlinkat", 79: "newfstatat", 80: "fstat", 81: "sync", 82: "fsync", 83: "fdatasync", 95: "waitid",
    98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 124: "sched_yield", 133: "rt_sigsuspend",
    137: "rt_sigtimedwait", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg",
    212: "recvmsg", 213: "readahead", 215: "munmap", 220: "clone", 221: "execve", 222: "mmap", 223: "fadvise64",
    227: "msync", 233: "madvise", 242: "accept4", 243: "recvmmsg", 260: "wait4", 285: "copy_file_range",
    286: "preadv2", 287: "pwritev2", 291: "statx",
}  # fmt: skip
_COMMON = {
    426: "io_uring_enter", 435: "clone3", 437: "openat2", 439: "faccessat2", 441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
_TABLES = {"x86_64": _X86_64 | _COMMON, "aarch64": _GENERIC | _COMMON, "riscv64": _GENERIC | _COMMON}
_TABLES["loongarch64"] = _TABLES["riscv64"]
_TABLE = _TABLES.get(platform.machine(), _COMMON)

# Wait channels, for when the system call may not be seen: first match wins.  Names of kernels 4.18 to 6.18.
_CHANNELS = (
    (("futex_",), Wait.LOCK),
    (("poll_schedule", "do_sys_poll", "do_poll", "do_select", "ep_poll", "schedule_hrtimeout"), Wait.POLL),
    (("wait_for_partner", "fifo_open"), Wait.OPEN),
    (("pipe_write", "anon_pipe_write"), Wait.FULL_PIPE),
    (("pipe_read", "anon_pipe_read", "pipe_wait"), Wait.PIPE),
    (("hrtimer_nanosleep", "do_nanosleep", "sigsuspend", "sys_pause", "do_sigtimedwait"), Wait.SLEEP),
    (("do_wait", "kernel_wait"), Wait.CHILD),
    (("inet_csk_accept",), Wait.ACCEPT),
    (("__skb_wait", "sk_wait", "unix_stream", "tcp_", "unix_wait", "sock_alloc_send"), Wait.SOCKET),
    (("do_signal_stop", "do_jobctl"), Wait.STOPPED),
    (("ptrace_stop",), Wait.TRACED),
)
_STORAGE = (
    "folio_wait", "wait_on_page", "__lock_page", "folio_lock", "io_schedule", "blk_", "bio_", "submit_bio", "nfs",
    "rpc_", "__rpc", "fuse_", "request_wait_answer", "cl_sync_io", "ll_", "ldlm_", "osc_", "ptlrpc_", "ceph_",
    "cifs_", "smb", "xfs_", "ext4_", "btrfs_", "jbd2_", "do_get_write", "iomap_", "filemap_", "wb_", "balance_dirty",
    "netfs_", "p9_", "v9fs_", "__wait_on_buffer", "wait_on_buffer", "zpl_", "zfs_", "cv_wait", "gpfs", "mxfs", "weka",
)  # fmt: skip

_FUTEX_OP_MASK = 0x7F  # without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME
_FUTEX_WAITS = {0, 6, 9, 11, 13}  # WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2


def syscall_name(call: Syscall | None) -> str | None:
    """The name of the system call a thread is in; None while it runs, is not in one, or it may not be seen."""
    if call is None or call.number is None or call.number < 0:
        return None
    return _TABLE.get(call.number, f"system call {call.number}")


def is_storage_wait(channel: str) -> bool:
    """Whether a kernel wait channel belongs to page cache, block layer or a file system."""
    return channel.startswith(_STORAGE)


def wait_of(state: str, call: Syscall | None, channel: str, links: Sequence[str] = ()) -> Wait:
    """What a thread waits for.

    Args:
        state: the letter of its stat file.
        call: its system call, None where the kernel does not let us see it.
        channel: the kernel function it sleeps in (``0`` or empty while running).
        links: what the descriptors among the call's arguments lead to, as ``/proc/PID/fd`` shows it.
    """
    by_state = {"T": Wait.STOPPED, "t": Wait.TRACED, "Z": Wait.ZOMBIE, "X": Wait.ZOMBIE}.get(state)
    if by_state is not None:
        return by_state
    name = syscall_name(call)
    if name is not None and call is not None:
        return _wait_in(name, call, state, channel, links)
    if state == "R":
        return Wait.RUNNING
    if state == "D" or is_storage_wait(channel):
        # Blocked outside any system call: a page of a mapped file is being fetched.
        return Wait.FAULT if call is not None and call.number == -1 and is_storage_wait(channel) else Wait.DISK
    for prefixes, wait in _CHANNELS:
        if channel.startswith(prefixes):
            return wait
    return Wait.RUNNING if channel in ("", "0") and call is not None else Wait.OTHER


def _wait_in(name: str, call: Syscall, state: str, channel: str, links: Sequence[str]) -> Wait:
    link = links[0] if links else ""
    if name in _READS:
        return _by_link(link, Wait.READ, Wait.PIPE)
    if name in _WRITES:
        return _by_link(link, Wait.WRITE, Wait.FULL_PIPE)
    if name == "futex":
        timed = len(call.args) > 3 and call.args[3] != 0
        waits = len(call.args) > 1 and call.args[1] & _FUTEX_OP_MASK in _FUTEX_WAITS
        return (Wait.TIMED_LOCK if timed else Wait.LOCK) if waits else Wait.RUNNING
    groups = (
        (_OPENS, Wait.OPEN),
        (_ASYNC_READS, Wait.READ),
        (_POLLS, Wait.POLL),
        (_SOCKETS, Wait.SOCKET),
        (_ACCEPTS, Wait.ACCEPT),
        (_SLEEPS, Wait.SLEEP),
        (_CHILDREN, Wait.CHILD),
        (("futex_waitv", "flock", "fcntl"), Wait.LOCK),
        (("ioctl",), Wait.DRIVER),
    )
    for names, wait in groups:
        if name in names:
            return wait
    if state == "R":
        return Wait.RUNNING
    return Wait.DISK if state == "D" or is_storage_wait(channel) else Wait.OTHER


def _by_link(link: str, file: Wait, pipe: Wait) -> Wait:
    if link.startswith("pipe:"):
        return pipe
    if link.startswith("socket:"):
        return Wait.SOCKET
    return Wait.POLL if link.startswith("anon_inode:") else file
