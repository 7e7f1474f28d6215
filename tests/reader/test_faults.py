"""What happens when processes die, files are damaged, the trainer forks: nothing hangs, nothing is wrong in silence."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsloader._launch import Child
from hsloader.errors import FeederError, LoaderError
from hsloader.reader import hosts, prefault
from hsloader.reader.client import FeederClient
from hsloader.reader.counters import TrainerCounter
from hsloader.reader.lease import Slot
from hsloader.store.dataset import Dataset
from tests.reader.making import (
    assert_filled,
    eventually,
    expected,
    make_client,
    make_dataset,
    poison,
    random_request,
    request_of,
    runs,
)

WAYS: list[dict[str, Any]] = [{"mode": "mmap"}, {"mode": "pread"}, {"mode": "direct"}, {"in_process": True}]
ROOT = Path(__file__).resolve().parents[2]


def whole(dataset: Dataset, samples: list[int]) -> Any:
    """The batch of these whole samples, in every field."""
    pieces = []
    for field in range(len(dataset.fields)):
        at = 0
        for sample in samples:
            pieces.append((field, sample, 0, int(dataset.lengths[sample]), at))
            at += int(dataset.lengths[sample])
    return request_of(pieces, len(dataset.fields), 2000)


def shard_of(dataset: Dataset, sample: int, field: str) -> tuple[Path, int, int]:
    """The shard that holds a sample's first chunk, the chunk's number in the segment, and its offset in the file."""
    array = dataset.segments[dataset.segment_of[sample]].array(field)
    chunk = int(dataset.first_rows[sample]) // array.chunk_rows
    shard, slot = divmod(chunk, array.shard_chunks)
    return array.shard_path(shard), chunk, int(array.index(shard)[slot][0])


# Processes that die.


def test_a_killed_feeder_is_started_again(usual: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(20)
    with make_client(usual, slots=4, restarts=5) as client:
        poison(client)
        requests = [random_request(rng, usual) for _ in range(40)]
        for key, request in enumerate(requests):
            for ahead in range(key, min(40, key + 3)):
                client.submit(ahead, requests[ahead])
            if key % 10 == 5:
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)
            assert_filled(usual, request, client.wait(key, 20))
            client.done(key)
        assert client.restarts == 4
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 4
    assert "SIGKILL" in told[0].getMessage()
    assert "started again" in told[0].getMessage()


def test_a_feeder_that_dies_over_and_over(usual: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "ENTRY", "tests.reader.no_such_module:main")
    with make_client(usual, restarts=2) as client:
        client.submit(0, random_request(np.random.default_rng(21), usual))
        for _ in range(2):  # a second look says the same
            with pytest.raises(FeederError, match=r"(?s)died 3 times.*status 1.*no_such_module"):
                client.wait(0, 60)
        assert client.restarts == 2
        monkeypatch.undo()
        client.abandon()
        assert client.wait_free(20)


def test_sigbus_names_the_file_in_hand(usual: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    request = random_request(np.random.default_rng(22), usual)
    with make_client(usual) as client:
        client.submit(0, request)
        assert_filled(usual, request, client.wait(0, 20))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        number = next(i for i in range(len(client.ring.threads)) if client.ring.path(i))
        row = client.ring.threads[number]
        row[2:7] = (4, time.monotonic_ns(), 1, 4096, 100)  # as if the thread were reading
        os.kill(client.pid, signal.SIGBUS)
        os.kill(client.pid, signal.SIGCONT)
        client.submit(1, request)
        assert_filled(usual, request, client.wait(1, 20))
    words = caplog.records[-1].getMessage()
    assert "SIGBUS" in words
    assert "Fatal Python error: Bus error" in words
    assert "at byte 4,096" in words  # other threads may be named beside it
    assert f"in {usual.path}" in words


def test_a_feeder_that_leaves_a_thread_in_the_kernel(
    usual: Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request = random_request(np.random.default_rng(23), usual)
    with make_client(usual) as client:
        client.submit(0, request)
        first = client.wait(0, 20)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        monkeypatch.setattr(hosts, "ENTRY", "tests.reader.stuck_feeder:main")
        client.submit(1, request)
        assert client.wait(1, 3) is None or client.restarts == 2
        monkeypatch.undo()
        second = client.wait(1, 20)
        assert_filled(usual, request, second)
        assert_filled(usual, request, client.wait(0))  # what was there stays
        assert first is not None
        assert second is not None
        assert first.ring != second.ring
        client.done(0)
        client.done(1)
        assert client.free == client.slots
    assert any("hangs in the kernel" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("place", ["close", "_say_what_it_is", "_ask", "take_over"])
@pytest.mark.parametrize("calls", [1, 2])
def test_ctrl_c_while_the_ring_is_replaced(
    usual: Dataset, monkeypatch: pytest.MonkeyPatch, place: str, calls: int
) -> None:
    """Whatever was moved by then, the next call brings every batch, in a ring that the stuck feeder does not have."""
    left = calls

    def interrupted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            return original(*args)

        return call

    monkeypatch.setattr(hosts, "_GRACE", 0.05)
    rng = np.random.default_rng(27)
    requests = [random_request(rng, usual) for _ in range(3)]
    with make_client(usual) as client:
        client.start()
        host = client._state.host
        assert isinstance(host, hosts.ProcessHost)
        os.kill(host.pid, signal.SIGSTOP)
        for key, request in enumerate(requests):
            client.submit(key, request)
        monkeypatch.setattr(host, "_stuck", True)  # as one whose thread hangs in the kernel
        old = client.ring
        owner = {"close": Child, "take_over": Slot}.get(place, FeederClient)
        monkeypatch.setattr(owner, place, interrupted(getattr(owner, place)))
        if place in ("_ask", "take_over") or calls == 1:
            with pytest.raises(KeyboardInterrupt):
                client.wait(0, 20)
        for key, request in enumerate(requests):
            assert_filled(usual, request, client.wait(key, 20))
        assert client.ring is not old
        for key in range(3):
            client.done(key)
        assert client.free == client.slots
        monkeypatch.undo()


SCRIPT = """
    import os, signal, sys, time
    from hsloader.store.dataset import open_dataset
    from tests.reader.making import make_client, random_request
    import numpy as np
    dataset = open_dataset(sys.argv[1])
    client = make_client(dataset)
    client.submit(0, random_request(np.random.default_rng(0), dataset))
    client.wait(0)
    {before}
    print(client.pid, flush=True)
    {after}
"""


def script(dataset: Dataset, before: str, after: str) -> subprocess.Popen[str]:
    """A trainer in a process of its own; its first line is the feeder's process id."""
    text = textwrap.dedent(SCRIPT).format(before=before, after=after)
    return subprocess.Popen(
        [sys.executable, "-c", text, str(dataset.path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("before", "number"),
    [
        ("", signal.SIGKILL),
        ("", signal.SIGTERM),
        ("os.fork() or time.sleep(3)", signal.SIGKILL),  # a child that holds the socket's other end
        ("client.abandon()", signal.SIGKILL),
    ],
    ids=["kill", "term", "forked", "idle"],
)
def test_a_killed_trainer_ends_its_feeder(usual: Dataset, before: str, number: int) -> None:
    with script(usual, before, "time.sleep(60)") as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        assert runs(pid)
        trainer.send_signal(number)
        assert eventually(lambda: not runs(pid), 1.0)
        trainer.wait(10)


@pytest.mark.parametrize("after", ["", "raise SystemExit(3)", "raise ValueError('oops')", "os._exit(0)"])
def test_the_end_of_the_script_ends_the_feeder(usual: Dataset, after: str) -> None:
    with script(usual, "", after) as trainer:
        out, err = trainer.communicate(timeout=30)
        assert eventually(lambda: not runs(int(out)), 1.0)
        assert "Exception ignored" not in err
        assert ("oops" in err) == ("oops" in after)


def test_signals_to_the_whole_group_leave_the_feeder_alone(usual: Dataset) -> None:
    with make_client(usual) as client:
        client.start()
        assert client.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(client.pid, number)
        request = random_request(np.random.default_rng(24), usual)
        client.submit(0, request)
        assert_filled(usual, request, client.wait(0, 20))
        assert client.restarts == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_pages_that_cannot_be_given_ahead_cost_no_feeder(
    usual: Dataset, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Threads may be limited, and ctrl-C may come: the feeder that was just started is used, and closed."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "hsl-prefault":
            raise error
        start(thread)

    monkeypatch.setattr(prefault, "cpu_share", lambda: 2)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with make_client(usual) as client:
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                client.start()
        else:
            client.start()
        pid = client.pid
        assert pid is not None
        request = random_request(np.random.default_rng(26), usual)
        client.submit(0, request)
        assert_filled(usual, request, client.wait(0, 20))
        assert client.pid == pid
    assert not runs(pid)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("in_process", [False, True])
def test_a_forked_child_gets_an_error(usual: Dataset, in_process: bool) -> None:
    with make_client(usual, in_process=in_process) as client:
        request = random_request(np.random.default_rng(25), usual)
        client.submit(0, request)
        assert_filled(usual, request, client.wait(0, 20))
        child = os.fork()
        if not child:
            status = 1
            try:
                sockets = [
                    name
                    for name in os.listdir("/proc/self/fd")
                    if _link(name).startswith(("socket:", "anon_inode:[pidfd"))
                ]
                try:
                    client.wait(0)
                except LoaderError as error:
                    status = 0 if "forked" in str(error) and not sockets else 2
                client.close()
                del client
                gc.collect()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.submit(1, request)
        assert_filled(usual, request, client.wait(1, 20))
        assert client.restarts == 0


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


# Files that are damaged.


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_a_flipped_byte_is_one_bad_sample(own: Dataset, way: dict[str, Any]) -> None:
    path, chunk, offset = shard_of(own, 3, "hidden_states")
    request = whole(own, [1, 3, 5])
    good = expected(own, request)
    own.close()
    with path.open("r+b") as file:
        file.seek(offset + 100)
        byte = file.read(1)[0]
        file.seek(offset + 100)
        file.write(bytes([byte ^ 1]))
    with make_client(own, rows=2000, **way) as client:
        poison(client)
        client.submit(0, request)
        filled = client.wait(0, 20)
        assert filled is not None
        (bad,) = filled.bad
        assert (bad.sample, bad.field, bad.kind) == (3, "hidden_states", "damage")
        assert (bad.path, bad.chunk, bad.offset) == (str(path), chunk, offset)
        assert "crc32c" in bad.text
        for number in (1, 2, 3):
            assert filled.spans[number].tobytes() == good[number].tobytes()
        start = int(own.lengths[1])
        rows = own.segments[own.segment_of[3]].array("hidden_states").chunk_rows
        wrong = filled.spans[0][start : start + min(rows, int(own.lengths[3]))]
        assert not wrong.any()  # zero, not half decoded
        rest = np.ones(2000, bool)
        rest[start : start + len(wrong)] = False
        np.testing.assert_array_equal(filled.spans[0][rest], good[0][rest])
        assert client.counters[TrainerCounter.BAD_SAMPLES] == 1
        assert client.stats()["bad_frames"] == 1


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_a_missing_shard_is_bad_samples(own: Dataset, way: dict[str, Any]) -> None:
    path, _, _ = shard_of(own, 0, "last_hidden_state")
    inside = [i for i in range(len(own)) if shard_of(own, i, "last_hidden_state")[0] == path][:4]
    path.unlink()
    with make_client(own, rows=2000, **way) as client:
        client.submit(0, whole(own, inside))
        filled = client.wait(0, 20)
        assert filled is not None
        assert sorted(bad.sample for bad in filled.bad) == inside
        assert {bad.field for bad in filled.bad} == {"last_hidden_state"}
        assert all(bad.path == str(path) and str(path) in bad.text for bad in filled.bad)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_a_shard_cut_off_under_the_reader(own: Dataset, way: dict[str, Any]) -> None:
    """The first batch opens (and maps) the shard; then it is truncated. The feeder survives and says which file."""
    with make_client(own, rows=2000, **way) as client:
        path, _, _ = shard_of(own, 0, "hidden_states")
        inside = [i for i in range(len(own)) if shard_of(own, i, "hidden_states")[0] == path]
        client.submit(0, whole(own, inside[:1]))
        filled = client.wait(0, 20)
        assert filled is not None
        assert not filled.bad
        os.truncate(path, shard_of(own, inside[-1], "hidden_states")[2] // 4096 * 4096)
        own.close()
        for key in (1, 2):
            assert client.submit(key, whole(own, inside[-1:]))
            filled = client.wait(key, 20)
            assert filled is not None
            assert [(bad.sample, bad.field, bad.path) for bad in filled.bad] == [
                (inside[-1], "hidden_states", str(path))
            ]
            assert "expected" in filled.bad[0].text
        assert client.restarts == 0


def test_a_truncation_that_kills_the_feeder(own: Dataset) -> None:
    """Where the file is cut between bringing it in and decoding it, SIGBUS ends the feeder: the next one says why."""
    with make_client(own, rows=2000) as client:
        path, _, _ = shard_of(own, 0, "hidden_states")
        client.submit(0, whole(own, [0]))
        assert client.wait(0, 20) is not None
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        client.submit(1, whole(own, [0]))
        os.truncate(path, 4096)
        os.kill(client.pid, signal.SIGBUS)
        os.kill(client.pid, signal.SIGCONT)
        filled = client.wait(1, 20)
        assert filled is not None
        assert [(bad.sample, bad.path) for bad in filled.bad] == [(0, str(path))]
        assert client.restarts == 1


def test_a_dataset_that_was_replaced(own: Dataset, tmp_path: Path) -> None:
    shutil.rmtree(own.path)
    make_dataset(own.path, samples=12, seed=99).close()
    with make_client(own, rows=2000) as client:
        client.submit(0, whole(own, [0]))
        with pytest.raises(FeederError, match="replaced by another"):
            client.wait(0, 20)


def test_a_dataset_that_has_grown(own: Dataset) -> None:
    from hsloader.store.writer import Writer
    from tests.reader.making import random_bits

    rng = np.random.default_rng(30)
    with Writer(own.path, append=True, allow_unknown=True) as writer:
        for _ in range(3):
            writer.append(**{field.name: random_bits(rng, field, 30) for field in own.fields.values()})
    with make_client(own, rows=2000) as client:
        request = whole(own, [0, 5])
        client.submit(0, request)
        assert_filled(own, request, client.wait(0, 20))


def test_a_lot_of_bad_samples_fit_the_report(tmp_path: Path) -> None:
    with make_dataset(
        tmp_path / "data.hs", {"input_ids": "int32", "state": ("float32", (50,))}, samples=500, longest=8
    ) as own:
        for segment in own.segments:
            array = segment.array("state")
            for shard in range(array.shards):
                array.shard_path(shard).unlink()
        client = FeederClient(own, ["state", "input_ids"], slot_bytes=1 << 20, budget=4 << 20, pieces=1)
        with client:
            pieces = [(0, i, 0, 1, i) for i in range(500)]
            client.submit(0, request_of(pieces, 2, 500))
            filled = client.wait(0, 20)
            assert filled is not None
            assert [bad.sample for bad in filled.bad] == list(range(500))
            assert all(bad.text for bad in filled.bad)


def test_reading_in_threads_is_said_once(
    usual: Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with make_client(usual, mode="mmap") as client:
        request = random_request(np.random.default_rng(26), usual)
        client.submit(0, request)
        assert_filled(usual, request, client.wait(0, 20))
        assert client.pid == os.getpid()
        assert client.mode == "pread"
        assert "truncated" in client.mode_reason
    assert [record.getMessage() for record in caplog.records if "slows the trainer" in record.getMessage()]


def test_the_feeder_needs_neither_torch_nor_zarr() -> None:
    # Nor multiprocessing, not even to decode: numcodecs would ask it for a lock.
    code = (
        "from hsloader.reader.boot import import_light; import_light(); import hsloader.reader.feeder\n"
        f"{_DECODE}"
        "heavy = {'torch', 'zarr', 'pandas', 'subprocess', 'logging', 'importlib.metadata', 'numcodecs.registry'}\n"
        "heavy |= {'multiprocessing', 'tempfile', 'numpy.ma'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    _run_as_a_child(code)


def test_the_feeder_has_the_ordinary_multiprocessing_where_numcodecs_wants_more_of_it() -> None:
    code = (
        "import types; from hsloader.reader import boot\n"
        "boot._without_locks = lambda: types.ModuleType('multiprocessing')\n"
        "boot.import_light(); import hsloader.reader.feeder\n"
        f"{_DECODE}"
        "import multiprocessing, numcodecs.blosc; assert numcodecs.blosc.multiprocessing is multiprocessing\n"
        "assert multiprocessing.get_context"
    )
    _run_as_a_child(code)


_DECODE = (
    "import numpy as np; from hsloader.store.codec import Codec; from hsloader.store.fields import Field\n"
    "codec = Codec(Field(name='hidden_states', dtype='bfloat16', shape=(256,), codec='lossless'), 8)\n"
    "rows = np.arange(2048, dtype='u2').reshape(8, 256); out = np.zeros(4096, np.uint8)\n"
    "codec.decode(codec.encoder().encode([rows]), out); assert (out.view('u2') == rows.ravel()).all()\n"
)


def _run_as_a_child(code: str) -> None:
    command = [sys.executable, "-P", "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]
    subprocess.run(command, check=True)


def test_the_feeder_imports_the_ordinary_way_where_the_light_one_fails(tmp_path: Path) -> None:
    """A package without the module that is wanted of it is imported whole, as its ``__init__`` says."""
    for name, text in (("whole", "value = 1"), ("whole/_inner", "")):
        path = tmp_path / f"{name}/__init__.py" if name == "whole" else tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from hsloader.reader.boot import _light\n"
        "_light('whole', '_inner', ('missing',)); import whole; assert whole.value == 1\n"
        "_light('no_such_package', 'x', ()); _light('json', 'decoder', ())\n"
        "import json; assert json.loads('1') == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
