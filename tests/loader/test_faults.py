"""What goes wrong while training, each in a process of its own: nothing hangs, nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loader.making import ROOT

HEAD = """
import os, signal, sys, time
import hsloader
loader = hsloader.DataLoader(sys.argv[1], trainer="raw", batch_size=2, log_every=0, {options})
feeder = lambda: loader._connection.client.pid
"""


class Script:
    """Runs a script on the dataset, and knows what it left."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.folder = folder
        self.mark = f"HSLOADER_TEST={uuid.uuid4()}"
        self.process: subprocess.Popen[str] | None = None

    def start(self, body: str, options: str = "") -> subprocess.Popen[str]:
        name, value = self.mark.split("=")
        code = HEAD.format(options=options) + body
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(self.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, name: value, "TMPDIR": str(self.folder)},
            start_new_session=True,
        )
        return self.process

    def run(self, body: str, options: str = "") -> tuple[int, str, str]:
        process = self.start(body, options)
        out, err = process.communicate(timeout=90)
        return process.returncode, out, err

    def relatives(self) -> list[int]:
        """Processes that carry the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def assert_gone(self) -> None:
        deadline = time.monotonic() + 5
        while self.relatives() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.relatives() == []
        assert list(self.folder.iterdir()) == []


@pytest.fixture
def script(path: Path, tmp_path: Path) -> Iterator[Script]:
    before = set(os.listdir("/dev/shm"))
    script = Script(path, tmp_path)
    yield script
    if script.process is not None:
        if script.process.poll() is None:
            os.killpg(script.process.pid, signal.SIGKILL)
        script.process.communicate()
    script.assert_gone()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "hsl" in name}


def until_line(process: subprocess.Popen[str], text: str) -> None:
    """Wait until the script prints ``text``."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the script ended: {process.communicate()[1]}")


COUNT = """
seen = []
for batch in loader:
    seen += [len(sample["input_ids"]) for sample in batch]
    {step}
print("samples", len(seen))
"""


def test_a_killed_feeder_is_replaced(script: Script) -> None:
    body = COUNT.format(step="if len(seen) == 6: os.kill(feeder(), signal.SIGKILL)")
    status, out, err = script.run(body)
    assert (status, out) == (0, "samples 24\n"), err
    (line,) = [line for line in err.splitlines() if "is started again" in line]
    assert line.startswith("hsloader: feeder (process ")
    assert "SIGKILL" in line
    assert line.endswith((" batch again", " batches again"))


def test_a_feeder_that_always_dies_ends_in_an_error(script: Script) -> None:
    # Killed before it can answer, each time.
    body = """
import hsloader.reader.hosts as hosts
launch = hosts.launch
def doomed(*args, **kwargs):
    child = launch(*args, **kwargs)
    os.kill(child.pid, signal.SIGKILL)
    return child
hosts.launch = doomed
try:
    next(iter(loader))
except hsloader.FeederError as error:
    print(error)
"""
    status, out, err = script.run(body, 'split="all", read=hsloader.ReadOptions(restarts=2)')
    assert status == 0, err
    assert "died 3 times over the same batch" in out
    assert "SIGKILL" in out


def test_a_stopped_feeder_is_reported_and_waited_for(script: Script) -> None:
    body = """
batches = iter(loader)
next(batches)
import threading
os.kill(feeder(), signal.SIGSTOP)
threading.Timer(1.5, os.kill, (feeder(), signal.SIGCONT)).start()
print("samples", 2 + sum(len(batch) for batch in batches))
"""
    status, out, err = script.run(body, "stall_after=0.3")
    assert (status, out) == (0, "samples 24\n"), err
    assert "stall" in err or "waited" in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_feeder_follows_a_killed_trainer(script: Script, number: signal.Signals) -> None:
    process = script.start("next(iter(loader)); print('ready', flush=True); time.sleep(60)")
    until_line(process, "ready")
    assert len(script.relatives()) >= 2  # itself and the feeder, which may have helpers
    os.kill(process.pid, number)
    assert process.wait(10) == -number
    script.assert_gone()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_whole_group(script: Script, number: signal.Signals) -> None:
    process = script.start("next(iter(loader)); print('ready', flush=True); time.sleep(60)")
    until_line(process, "ready")
    os.killpg(process.pid, number)
    assert process.wait(10) == -number
    script.assert_gone()


def test_ctrl_c_loses_no_batch(script: Script) -> None:
    """Interrupts at any moment inside next(): calling it again gives the same batch."""
    body = """
import random
interrupts = 0
def interrupt(number, frame):
    global interrupts
    while frame is not None:
        if frame.f_code.co_name == "__next__" and frame.f_code.co_filename.endswith("hsloader/loader.py"):
            interrupts += 1
            raise KeyboardInterrupt
        frame = frame.f_back
signal.signal(signal.SIGALRM, interrupt)
expected = [sum(int(s["input_ids"].sum()) for s in batch) for batch in loader]
random.seed(0)
begun = time.monotonic()
while time.monotonic() < begun + 8:
    loader.set_epoch(0)
    batches = iter(loader)
    got = []
    while True:
        signal.setitimer(signal.ITIMER_REAL, random.random() * 2e-3)
        try:
            batch = next(batches)
        except KeyboardInterrupt:
            continue
        except StopIteration:
            break
        got.append(sum(int(s["input_ids"].sum()) for s in batch))
    assert got == expected, (got, expected)
    assert loader.state_dict()["epoch"] == 1
print("interrupts", interrupts)
"""
    status, out, err = script.run(body, "shuffle=False")
    assert status == 0, err
    assert int(out.split()[1]) > 50


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("for batch in loader: raise RuntimeError('mine')", 1),
        ("for batch in loader: sys.exit(3)", 3),
        ("for batch in loader: os._exit(4)", 4),
        ("kept = list(loader)", 0),
        ("batches = iter(loader); kept = next(batches)", 0),
        ("for batch in loader: break", 0),
        ("import gc; gc.disable(); kept = next(iter(loader)); loader.me = loader", 0),
    ],
)
def test_the_end_of_a_script(script: Script, body: str, status: int) -> None:
    found, _, err = script.run(body)
    assert found == status, err
    assert "Error" not in err.replace("RuntimeError: mine", ""), err


def test_a_forked_child_is_told_what_to_do(script: Script) -> None:
    body = """
import warnings
warnings.simplefilter("ignore")
batches = iter(loader)
next(batches)
pid = os.fork()
if not pid:
    try:
        next(batches)
    except hsloader.LoaderError as error:
        print(error, flush=True)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print("samples", 2 + sum(len(batch) for batch in batches))
"""
    status, out, err = script.run(body)
    assert status == 0, err
    assert "was forked from it" in out
    assert out.endswith("samples 24\n")


@pytest.mark.parametrize("call", ["iter(loader)", "loader.stats()"])
def test_a_forked_child_is_told_so_by_whatever_it_calls_first(script: Script, call: str) -> None:
    body = f"""
import warnings
warnings.simplefilter("ignore")
pid = os.fork()
if not pid:
    try:
        {call}
    except hsloader.LoaderError as error:
        print(error, flush=True)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print("samples", sum(len(batch) for batch in loader))
"""
    status, out, err = script.run(body)
    assert status == 0, err
    assert "was forked from it" in out, err
    assert out.endswith("samples 24\n")


def test_a_script_without_a_main_guard(script: Script, tmp_path: Path) -> None:
    """The feeder does not import the script again, whatever it does at module level."""
    file = tmp_path / "train.py"
    file.write_text(
        "import sys, hsloader\n"
        "print('begin')\n"
        "loader = hsloader.DataLoader(sys.argv[1], trainer='raw', log_every=0)\n"
        "print(len(list(loader)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(file), str(script.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (0, "begin\n24\n"), done.stderr
    file.unlink()


def test_nothing_grows_over_epochs(script: Script) -> None:
    body = """
import psutil
me = psutil.Process()
def counts():
    processes = [me, *me.children()]
    return [sum(p.num_fds() for p in processes), sum(p.num_threads() for p in processes), len(processes)]
list(loader)
before = counts()
for _ in range(20):
    for batch in loader:
        pass
print(before == counts(), before, counts())
"""
    status, out, err = script.run(body)
    assert status == 0, err
    assert out.startswith("True"), out
