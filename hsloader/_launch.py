"""Start a child process of this package without ``multiprocessing``: the feeder and the conversion workers.

``spawn`` would import the user's script again and ``fork`` would copy CUDA state and held locks, so a child is
``sys.executable -P -S -c BOOT`` with the parent's ``sys.path`` as an argument.  It gets one end of a socket pair,
any further descriptors by name, and a pidfd of its parent.  It leaves when the socket or the parent ends:
parent-death signals fire when the *thread* that launched ends, and end of file alone fails while a forked process
holds the socket.

Signals that a terminal or a scheduler sends to the whole process group are blocked in the child (the mask is
inherited, so there is no window after the start in which they would kill it): the parent decides when a child ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess  # the parent's business: a child does without

__all__ = ["Child", "LaunchUnavailableError", "Parent", "child_main", "launch", "launch_problem"]

_BOOT = (
    "import sys,json\n"
    "spec=json.loads(sys.argv[1])\n"
    "sys.path[:]=spec['path']\n"
    "from hsloader._launch import child_main\n"
    "child_main(spec)\n"
)
_BLOCKED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
_LOG_TAIL = 4096


class LaunchUnavailableError(RuntimeError):
    """This interpreter cannot start itself again (embedded, frozen); callers work in the process instead."""


class Child:
    """A running child as its parent sees it.

    ``channel`` is a connected stream socket, ``pidfd`` becomes readable when the child has ended (None where the
    kernel refuses pidfds), ``pid`` its process id.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, log: int, name: str) -> None:
        self.name = name
        self.channel = channel
        self.pid = process.pid
        self.pidfd = _pidfd(process.pid)
        self._process = process
        self._log = log
        self._owner = os.getpid()

    def poll(self) -> int | None:
        """The exit status if the child has ended (negative: the signal), else None; reaps it."""
        return self._process.poll()

    def wait(self, timeout: float) -> int | None:
        """Wait for the child to end by itself; its exit status, or None if it still runs after ``timeout`` seconds."""
        import subprocess

        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self) -> str:
        """The last 4 KiB that the child wrote to its stderr (tracebacks, faulthandler's dump)."""
        if self._log < 0:
            return ""
        size = os.fstat(self._log).st_size
        data = os.pread(self._log, _LOG_TAIL, max(0, size - _LOG_TAIL))
        return data.decode(errors="replace").strip()

    def ending(self) -> str:
        """How the child ended, in words: the signal or status, and the tail of what it wrote to stderr."""
        status = self.poll()
        if status is None:
            what = "still runs"
        elif status < 0:
            try:
                word = signal.Signals(-status).name
            except ValueError:
                word = "unknown"
            what = f"was killed by signal {-status} ({word})"
            if -status == signal.SIGKILL:
                what += ", which is how the kernel ends a process when memory runs out"
        else:
            what = f"ended with status {status}"
        tail = self.log_tail()
        return f"{self.name} (process {self.pid}) {what}" + (f"; its last words:\n{tail}" if tail else "")

    def close(self, grace: float = 5.0) -> int | None:
        """End the child: hang up, wait up to ``grace`` seconds, then kill. Returns its status. Safe to call again.

        In a process forked from the parent only the descriptors are closed.
        """
        if self._log < 0:
            return self._process.returncode
        with contextlib.suppress(OSError):
            self.channel.close()
        status = None
        if os.getpid() == self._owner:
            status = self.wait(grace)
            if status is None:
                self._process.kill()
                # A thread that waits for a dead disk or server keeps even a killed process; it is not waited for long.
                status = self.wait(grace)
        elif self._process.returncode is None:
            self._process.returncode = 0  # not this process's child: nothing to wait for, nothing to warn about
        for fd in (self.pidfd, self._log):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.pidfd, self._log = None, -1
        return status

    def kill(self) -> None:
        """Send SIGKILL; the child is still to be closed."""
        if self._process.poll() is None:
            self._process.kill()


class Parent:
    """The parent as its child sees it: the socket, the descriptors by name, the arguments."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.channel = socket.socket(fileno=spec["channel"])
        self.fds: dict[str, int] = dict(spec["fds"])
        self.args: Any = spec["args"]
        self.pidfd: int | None = spec["pidfd"]
        self._pid: int = spec["pid"]

    def gone(self) -> bool:
        """Whether the parent process has ended."""
        if self.pidfd is None:
            return os.getppid() != self._pid
        poller = select.poll()  # select() refuses descriptors from 1024 on, and a child's have its parent's numbers
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def leave_with_it(self) -> None:
        """Start a daemon thread that ends this process at once when the parent ends or hangs up."""
        threading.Thread(target=self._watch, name="hsloader-parent-watch", daemon=True).start()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        if self.pidfd is not None:
            poller.register(self.pidfd, select.POLLIN)
        while True:
            if poller.poll(None if self.pidfd is not None else 1000) or self.gone():
                os._exit(0)


def launch(
    entry: str,
    *,
    args: object = None,
    fds: Mapping[str, int] | None = None,
    name: str = "child",
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start ``entry`` (``"package.module:function"``) in a child; it is called with one argument, its ``Parent``.

    ``args`` is anything JSON can carry (keep it small: it travels on the command line), ``fds`` are descriptors
    that the child gets under the same names, ``environment`` is added to the parent's.  Raises
    ``LaunchUnavailableError`` where there is no interpreter to start, ``OSError`` where the system refuses.
    """
    import subprocess

    problem = launch_problem()
    if problem:
        raise LaunchUnavailableError(problem)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    log = -1
    own_pidfd = _pidfd(os.getpid())
    child = None
    try:
        log = _log_file(name)
        spec = {
            "path": _search_path(),
            "entry": entry,
            "channel": theirs.fileno(),
            "pidfd": own_pidfd,
            "pid": os.getpid(),
            "fds": dict(fds or {}),
            "args": args,
        }
        passed = [theirs.fileno(), *(fds or {}).values()] + ([own_pidfd] if own_pidfd is not None else [])
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONINSPECT"}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-S", "-c", _BOOT, json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=passed,
                env={**variables, **(environment or {})},
            )
            child = Child(process, ours, log, name)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # here ctrl-C arrives that was typed meanwhile
        return child
    except BaseException:
        if child is not None:
            child.kill()
            child.close()
        else:
            ours.close()
            if log >= 0:
                os.close(log)
        raise
    finally:
        theirs.close()
        if own_pidfd is not None:
            os.close(own_pidfd)


def launch_problem() -> str:
    """Why this interpreter cannot start a child; empty if it can."""
    if not sys.executable or not Path(sys.executable).exists():
        return f"sys.executable is {sys.executable!r}: no interpreter to start a child with"
    if getattr(sys, "frozen", False):
        return f"this program is frozen: {sys.executable} is no Python interpreter"
    return ""


def child_main(spec: Mapping[str, Any]) -> None:
    """What the boot code calls in the child: run the entry and leave."""
    faulthandler.enable()
    parent = Parent(spec)
    if parent.gone():  # killed while this interpreter started: nothing may be begun in its name
        return
    module, _, function = spec["entry"].partition(":")
    target: Callable[[Parent], None] = getattr(importlib.import_module(module), function)
    target(parent)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, or a sandbox that filters the call
        return None


def _log_file(name: str) -> int:
    try:
        return os.memfd_create(f"hsloader-log-{name}", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        import tempfile

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def _search_path() -> list[str]:
    """The parent's import path without its working directory, and with the folder that holds this package.

    Editable installs by import hook do not survive ``-S``; a stray ``random.py`` beside the user's data would
    otherwise be imported by the child.  Where this package lies in the working directory, it comes before another
    that is installed, so that the child runs the same one.
    """
    try:
        here = str(Path.cwd())
    except FileNotFoundError:  # the working directory was deleted under us
        here = ""
    # Whatever is no string (a Path, by mistake) the import system passes over, and so must we.
    path = [p for p in sys.path if p and isinstance(p, str) and os.path.abspath(p) != here]
    package = str(Path(__file__).resolve().parent.parent)
    if package in path:
        return path
    others = (at for at, p in enumerate(path) if Path(p, "hsloader", "__init__.py").is_file())
    path.insert(next(others, len(path)), package)
    return path
