"""doctor names the file and the trouble of real processes, within three seconds of its beginning."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsloader.errors import HsloaderError
from hsloader.monitor.access import ProcAccess
from hsloader.monitor.examine import Examination, examine
from hsloader.monitor.kernel import Wait
from hsloader.monitor.roles import Role
from hsloader.monitor.situation import Kind
from tests.monitor.running import script

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="doctor reads /proc")

_DATA = """
    import torch, threading
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 100000
        def __getitem__(self, i): return item(i)
    def loop(**settings):
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2, **settings):
            pass
"""


def _examine(pid: int, seconds: float = 1.2) -> Examination:
    began, starved = time.monotonic(), _waited_for_a_core()
    found = examine(pid, seconds, python=False)
    # Twice: the thread that makes patient calls waits for a core as well.
    assert time.monotonic() - began - 2 * (_waited_for_a_core() - starved) < 3.0
    json.dumps(found.as_dict())
    return found


def _waited_for_a_core() -> float:
    """Seconds in which this thread wanted to run and another had the core."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


@pytest.mark.torch
def test_stock_loader_that_reads_big_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for i in range(5):  # of four each worker would get two only, and six looks may all meet the same one
        torch.save({"x": torch.zeros(6_000_000)}, tmp_path / f"data_{i}.pt")
    body = f"""{_DATA}
    def item(i):
        if i == 40: ready()
        return torch.load(f"data_{{i % 5}}.pt", weights_only=True)["x"][:8].clone()
    loop(num_workers=2)
    """
    with script(tmp_path, body) as process:
        found = _examine(process.pid)
        assert found.verdict.kind in (Kind.READING, Kind.DISK, Kind.WORKER_CPU)
        assert "2 workers read" in found.verdict.sentence
        assert "24 MB" in found.verdict.sentence
        assert str(tmp_path / "data_") in found.verdict.sentence
        assert "nothing is deadlocked" in found.verdict.sentence
        workers = [p for p in found.processes if p.role is Role.WORKER]
        assert len(workers) == 2
        assert all(p.read_rate > 1e6 for p in workers)
        # Who looks gets a core when one of them waits: where cores are short it may always be the same one.
        files = [p.file for p in workers if p.file is not None]
        assert files
        assert [file.size for file in files] == [Path(file.path).stat().st_size for file in files]
        assert found.processes[0].role is Role.TRAINER
        # A worker alone is examined too, and the way to the whole is told.
        alone = _examine(workers[0].pid, 0.6)
        assert any(f"hsloader doctor {process.pid}" in note for note in alone.notes)
        assert alone.verdict.kind in (Kind.READING, Kind.DISK, Kind.WORKER_CPU)


def test_a_descriptor_that_became_another_file_during_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers close a file and get shared memory under the same number: its size is not the file's."""
    (tmp_path / "data.pt").write_bytes(bytes(5000))
    (tmp_path / "other").write_bytes(bytes(64))
    with script(tmp_path, "file = open('data.pt', 'rb'); ready(); time.sleep(600)") as process:
        (file,) = _examine(process.pid, 0.3).processes[0].files
        assert (file.path, file.size) == (str(tmp_path / "data.pt"), 5000)
        monkeypatch.setattr(ProcAccess, "link", lambda *_: str(tmp_path / "other"))
        monkeypatch.setattr(ProcAccess, "stat_open_file", lambda *_: (tmp_path / "other").stat())
        assert _examine(process.pid, 0.3).processes[0].files == ()


@pytest.mark.torch
@pytest.mark.parametrize("opened", [False, True], ids=["open", "read"])
def test_worker_blocked_on_a_named_pipe(tmp_path: Path, opened: bool) -> None:
    pytest.importorskip("torch")
    pipe = tmp_path / "slow.pt"
    os.mkfifo(pipe)
    holder = os.open(pipe, os.O_RDWR) if opened else -1  # a writer that never writes
    body = f"""{_DATA}
    def item(i):
        if i == 3:
            ready()
            open("slow.pt", "rb").read()
        return torch.zeros(1)
    loop(num_workers=2)
    """
    try:
        with script(tmp_path, body) as process:
            found = _examine(process.pid)
    finally:
        if opened:
            os.close(holder)
    assert found.verdict.kind is Kind.STUCK_READ
    assert f"{'reading' if opened else 'opening'} the named pipe {pipe}" in found.verdict.sentence
    assert "worker 1" in found.verdict.sentence


@pytest.mark.torch
def test_stock_loader_that_deadlocked_at_fork(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    body = f"""{_DATA}
    lock = threading.Lock()
    def item(i):
        ready()
        with lock: return torch.zeros(1)
    lock.acquire()
    loop(num_workers=2)
    """
    with script(tmp_path, body, ready=2) as process:
        found = _examine(process.pid)
    assert found.verdict.kind is Kind.DEADLOCK
    assert "both workers wait for a lock" in found.verdict.sentence
    assert "deadlock after fork" in found.verdict.sentence


def test_one_file_read_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "all.pt").write_bytes(bytes(3_000_000))
    body = """
    ready()
    while True:
        with open("all.pt", "rb") as file: file.read()
    """
    with script(tmp_path, body) as process:
        for _ in range(3):  # each look is a sample: one may meet the process between two files
            found = _examine(process.pid, 2.0)
            if found.verdict.kind is Kind.SAME_FILE:
                break
    assert found.verdict.kind is Kind.SAME_FILE
    assert str(tmp_path / "all.pt") in found.verdict.sentence


def test_process_that_reads_without_workers(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"data_{i}.pt").write_bytes(bytes(1_000_000))
    body = """
    ready()
    i = 0
    while True:
        with open(f"data_{i % 20}.pt", "rb") as file:
            file.read(500_000); time.sleep(0.02); file.read()
        i += 1
    """
    with script(tmp_path, body) as process:
        found = _examine(process.pid)
    assert found.verdict.kind is Kind.READING
    assert "no workers" in found.verdict.sentence
    assert str(tmp_path / "data_") in found.verdict.sentence


def test_stopped_process(tmp_path: Path) -> None:
    with script(tmp_path, "ready(); time.sleep(600)") as process:
        os.kill(process.pid, signal.SIGSTOP)
        found = _examine(process.pid, 0.4)
    assert found.verdict.kind is Kind.STOPPED
    assert f"kill -CONT {process.pid}" in found.verdict.advice


def test_busy_process_is_told_from_a_waiting_one(tmp_path: Path) -> None:
    with script(tmp_path, "ready()\nwhile True: pass") as process:
        for _ in range(5):  # a machine with much else to do may give it little
            found = _examine(process.pid)
            if found.processes[0].busy_threads:
                break
    assert found.verdict.kind is Kind.TRAINER
    assert found.processes[0].busy_threads[0].tid == process.pid
    with script(tmp_path, "ready(); time.sleep(600)") as process:
        found = _examine(process.pid, 0.4)
    assert found.verdict.kind is Kind.SLEEPING
    assert found.processes[0].wait is Wait.SLEEP


def test_process_that_ends_while_watched(tmp_path: Path) -> None:
    with script(tmp_path, "ready(); time.sleep(0.3)") as process:
        found = examine(process.pid, 5.0, python=False)
    assert found.verdict.kind is Kind.ENDED
    assert found.seconds < 2.0


def test_the_id_of_a_thread_stands_for_its_process(tmp_path: Path) -> None:
    body = """
    import threading
    thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    thread.start()
    open("tid", "w").write(str(thread.native_id))
    ready()
    while True: time.sleep(600)
    """
    with script(tmp_path, body) as process:
        found = _examine(int((tmp_path / "tid").read_text()), 0.4)
    assert found.pid == process.pid
    assert f"the training process (pid {process.pid}) sleeps" in found.verdict.sentence


def test_what_is_no_training_process_is_refused() -> None:
    with pytest.raises(HsloaderError, match="is the one that asks"):
        examine(os.getpid(), 0.2)
    if Path("/proc/2/comm").exists() and Path("/proc/2/comm").read_text() == "kthreadd\n":
        with pytest.raises(HsloaderError, match=r"process 2 \(kthreadd\) is a thread of the kernel"):
            examine(2, 0.2)


def test_no_such_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError, match=f"no process {child.pid}"):
        examine(child.pid)


def test_the_command_prints_verdict_table_and_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hsloader", "doctor", "--seconds", "0.3", "--no-python"]
    root = Path(__file__).parents[2]
    with script(tmp_path, "ready(); time.sleep(600)") as process:
        done = subprocess.run(
            [*command, str(process.pid)], cwd=root, capture_output=True, text=True, check=True, timeout=60
        )
        as_json = subprocess.run(
            [*command, str(process.pid), "--json"], cwd=root, capture_output=True, text=True, check=True, timeout=60
        )
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"the training process (pid {process.pid}) sleeps")
    assert any(line.split()[:4] == ["the", "training", "process", str(process.pid)] for line in lines)
    found = json.loads(as_json.stdout)
    assert found["verdict"]["kind"] == "sleeping"
    assert found["processes"][0]["pid"] == process.pid
    gone = subprocess.run(
        [*command, str(process.pid)], cwd=root, capture_output=True, text=True, check=False, timeout=60
    )
    assert gone.returncode == 1
    assert f"no process {process.pid} in /proc" in gone.stderr


def test_watching_needs_neither_torch_nor_zarr() -> None:
    code = (
        "import sys, pkgutil, importlib, hsloader.monitor as m\n"
        "for found in pkgutil.iter_modules(m.__path__): importlib.import_module(f'hsloader.monitor.{found.name}')\n"
        "print({'torch', 'zarr', 'numpy', 'rich', 'hsloader.reader'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else to be refused")
def test_process_of_another_user_says_what_is_hidden(tmp_path: Path) -> None:
    with script(tmp_path, "ready(); time.sleep(600)") as process:
        code = (
            "import os, sys; sys.path[:0] = eval(sys.argv[2])\n"
            "from hsloader.monitor.examine import examine\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "found = examine(int(sys.argv[1]), 0.4, python=False)\n"
            "print(found.verdict.kind, *found.notes, sep='\\n')"
        )
        paths = [str(Path(__file__).parents[2]), *sys.path]
        done = subprocess.run(
            [sys.executable, "-c", code, str(process.pid), repr(paths)], capture_output=True, text=True, check=False
        )
    assert "another user" in done.stdout
    assert "as root" in done.stdout
