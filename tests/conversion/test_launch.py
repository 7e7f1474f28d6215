"""The launcher that the feeder and the conversion workers share."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsloader import _launch
from hsloader._launch import Parent, launch

HERE = "tests.conversion.test_launch"


def echo(parent: Parent) -> None:
    """In the child: say who we are, then send back what comes until the other end hangs up."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    heavy = [m for m in ("torch", "zarr", "numpy") if m in sys.modules]
    hello = f"{parent.args['word']} {os.pread(parent.fds['note'], 4, 0).decode()} {signal.SIGINT in blocked} {heavy}"
    parent.channel.sendall(hello.encode() + b"\n")
    while data := parent.channel.recv(100):
        parent.channel.sendall(data)


def fail(parent: Parent) -> None:
    raise ValueError("the child's own words")


def sleep(parent: Parent) -> None:
    parent.leave_with_it()
    parent.channel.sendall(b"up\n")
    time.sleep(60)


def grandparent() -> None:
    """Run by a test in a process of its own, which is then killed."""
    child = launch(f"{HERE}:sleep", name="sleeper")
    child.channel.recv(3)
    print(child.pid, flush=True)
    time.sleep(60)


def test_child_gets_arguments_descriptors_and_a_quiet_signal_mask(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("note")
    note = os.open(tmp_path / "note", os.O_RDONLY)
    child = launch(f"{HERE}:echo", args={"word": "hello"}, fds={"note": note}, name="echo")
    os.close(note)
    assert child.channel.recv(100) == b"hello note True []\n"
    child.channel.sendall(b"again")
    assert child.channel.recv(100) == b"again"
    os.kill(child.pid, signal.SIGINT)  # what ctrl-C does to the whole group
    child.channel.sendall(b"alive")
    assert child.channel.recv(100) == b"alive"
    assert child.close() == 0
    assert child.close() == 0


def test_a_failed_child_is_quoted() -> None:
    child = launch(f"{HERE}:fail", name="worker")
    assert child.channel.recv(1) == b""
    child._process.wait()
    assert "ended with status 1" in child.ending()
    assert "the child's own words" in child.ending()
    child.close()


def test_a_killed_child_is_named_with_its_signal() -> None:
    child = launch(f"{HERE}:sleep", name="worker")
    child.kill()
    child._process.wait()
    assert "SIGKILL" in child.ending()
    assert child.close() == -signal.SIGKILL


def test_close_ends_a_child_that_does_not_listen() -> None:
    child = launch(f"{HERE}:sleep", name="sleeper")
    child.channel.recv(3)
    began = time.monotonic()
    child.close()
    assert time.monotonic() - began < 4


def test_the_child_leaves_when_its_parent_is_killed() -> None:
    code = f"from {HERE} import grandparent; grandparent()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as middle:
        assert middle.stdout is not None
        pid = int(middle.stdout.readline())
        middle.kill()
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}/status").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < end, "the child outlived its parent"
        time.sleep(0.01)


def test_a_parent_with_many_open_files_has_children() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this process may open {hard} files at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1060)]  # select() ends at descriptor 1023
    try:
        child = launch(f"{HERE}:sleep", name="sleeper")
        try:
            assert child.channel.recv(3) == b"up\n", child.ending()
        finally:
            child.close()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ctrl_c_while_a_child_starts_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = signal.pthread_sigmask

    def mask(how: int, signals: object) -> object:
        before = real(how, signals)  # type: ignore[arg-type]
        if how == signal.SIG_SETMASK:  # where a SIGINT that was blocked meanwhile is delivered
            raise KeyboardInterrupt
        return before

    monkeypatch.setattr(signal, "pthread_sigmask", mask)
    with pytest.raises(KeyboardInterrupt):
        launch(f"{HERE}:sleep", name="sleeper")


def test_an_import_path_may_hold_what_is_no_string(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), *sys.path])
    child = launch(f"{HERE}:sleep", name="sleeper")
    assert child.channel.recv(3) == b"up\n"
    child.close()


def test_the_child_runs_the_package_that_its_parent_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(_launch.__file__).resolve().parents[1])
    installed = tmp_path / "site-packages"
    (installed / "hsloader").mkdir(parents=True)
    (installed / "hsloader" / "__init__.py").touch()
    monkeypatch.chdir(here)  # a checkout, from which a script is run beside an installed release
    monkeypatch.setattr(sys, "path", [here, "/stdlib", str(installed)])
    assert _launch._search_path() == ["/stdlib", here, str(installed)]
    monkeypatch.setattr(sys, "path", [here, "/stdlib"])
    assert _launch._search_path() == ["/stdlib", here]


def test_no_interpreter_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(RuntimeError, match="no interpreter"):
        launch(f"{HERE}:echo")
