"""What holds for every test: no network, no settings from outside, and nothing left behind.

A test that leaves a thread, a child process, a file descriptor, or a file in the working or temporary folder fails,
with the names of what it left. What libraries keep for the life of a process, and nobody can close, is named in
``_LIBRARY_THREADS``, ``_library_descriptor`` and ``_RESOURCE_TRACKER``.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

_GRACE_SECONDS = 3.0

# Threads that a library starts once and keeps: zarr's event loop and its pool, fsspec's event loop.
_LIBRARY_THREADS = re.compile(r"(zarr_io|zarr_pool_\d+|asyncio_\d+|fsspecIO|pytest_timeout.*)\Z")

# multiprocessing's own child, which unlinks the semaphores of spawned workers and lives as long as the process.
# Stopping it early would leave it to complain about semaphores that are collected later.
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"

# CUDA's own, which it opens as it needs them and keeps as long as the process lives.
_LIBRARY_FILES = re.compile(r"/dev/nvidia")

# Names the tests must not see: our own settings and a surrounding job's ranks.
_FOREIGN_SETTINGS = re.compile(r"(HSLOADER_.*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|TORCHELASTIC_.*|SLURM_.*)\Z")

_temporary: str | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a temporary folder of its own, so that what lies in it later was left by a test."""
    global _temporary  # noqa: PLW0603 - made here, removed in pytest_unconfigure
    for name in list(os.environ):
        if _FOREIGN_SETTINGS.match(name):
            del os.environ[name]
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    _temporary = tempfile.mkdtemp(prefix="hsloader-tests-")
    os.environ["TMPDIR"] = _temporary
    tempfile.tempdir = None
    # A shell starts what it runs in the background with SIGINT ignored, nohup with SIGHUP; children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.addaudithook(_no_network)
    _quiet_hypothesis()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the run's temporary folder."""
    if _temporary is not None:
        shutil.rmtree(_temporary, ignore_errors=True)


def _quiet_hypothesis() -> None:
    try:
        import hypothesis
        from hypothesis.configuration import set_hypothesis_home_dir
    except ImportError:
        return
    set_hypothesis_home_dir(Path(_temporary or ".") / "hypothesis")
    hypothesis.settings.register_profile("hsloader", database=None, deadline=None)
    hypothesis.settings.load_profile("hsloader")


def _no_network(event: str, arguments: tuple[object, ...]) -> None:
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else "localhost"
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host or "localhost")
    if name not in ("localhost", "::1", "0.0.0.0", "::") and not name.startswith("127."):
        raise RuntimeError(f"a test may not reach the network: {event} to {name}")


def _threads() -> set[tuple[str, int]]:
    return {
        (thread.name, thread.ident or 0)
        for thread in threading.enumerate()
        if thread.is_alive() and not _LIBRARY_THREADS.match(thread.name)
    }


def _children() -> set[tuple[str, int]]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())[:200] or child.name()
            if _RESOURCE_TRACKER not in command:
                found.add((command, child.pid))
        except psutil.NoSuchProcess:
            continue
        except psutil.ZombieProcess:
            found.add(("a child that ended and was not waited for", child.pid))
    return found


def _descriptors() -> set[tuple[str, int]]:
    found = set()
    tracker = getattr(sys.modules.get(_RESOURCE_TRACKER), "_resource_tracker", None)
    kept = getattr(tracker, "_fd", None)
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not _LIBRARY_FILES.match(target):
                found.add((target, int(name)))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return {entry for entry in found if entry[1] != kept and not entry[0].startswith(f"/proc/{os.getpid()}/")}


def _files() -> set[tuple[str, int]]:
    folders = [Path.cwd(), Path(tempfile.gettempdir())]
    tools = ("hypothesis", "__pycache__", ".")  # what the test tools themselves write
    return {(str(entry), 0) for folder in folders for entry in folder.iterdir() if not entry.name.startswith(tools)}


def _event_loops() -> frozenset[str]:
    return frozenset(thread.name for thread in threading.enumerate() if thread.name in ("zarr_io", "fsspecIO"))


def _library_descriptor(target: str) -> bool:
    """Whether ``target`` looks like the poll descriptor or the socket pair of an event loop."""
    return target.startswith(("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "socket:"))


def _left(look: Callable[[], set[tuple[str, int]]], before: set[tuple[str, int]], loops: frozenset[str]) -> list[str]:
    """What ``look`` sees beyond ``before``, after garbage was collected and things had a moment to end.

    ``loops`` are the libraries' event loops that ran before the test: the test that starts one gets its descriptors.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    while True:
        left = look() - before
        if _event_loops() != loops:
            left = {entry for entry in left if not _library_descriptor(entry[0])}
        if not left or time.monotonic() > deadline:
            return [f"{name} ({number})" if number else name for name, number in sorted(left)]
        gc.collect()
        time.sleep(0.02)


@pytest.fixture(scope="session")
def cuda() -> None:
    """CUDA is up: its context, pipes and event descriptors last as long as the process, and are not a test's."""
    import torch

    matrix = torch.ones(64, 64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.mm(matrix, matrix)
        matrix.copy_(torch.empty(64, 64, pin_memory=True), non_blocking=True)
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    folder = Path.cwd()
    looks = {"thread": _threads, "child process": _children, "file descriptor": _descriptors, "file": _files}
    before = {kind: look() for kind, look in looks.items()}
    loops = _event_loops()
    yield
    left = [f"{kind}: {name}" for kind, look in looks.items() for name in _left(look, before[kind], loops)]
    if Path.cwd() != folder:
        left.append(f"working folder: {Path.cwd()} (was {folder})")
    if left:
        pytest.fail("the test left behind\n  " + "\n  ".join(left), pytrace=False)
