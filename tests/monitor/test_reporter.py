"""What a loader says, where it says it, and what it says of a real stall."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hsloader.monitor import neighbours
from hsloader.monitor.counters import FeederCounter, Stage, TrainerCounter
from hsloader.monitor.header import Snapshot, take_snapshot
from hsloader.monitor.neighbours import FoundRing, Siblings, find_rings, job_name
from hsloader.monitor.ranges import mark_stages, stage
from hsloader.monitor.reporter import Reporter
from hsloader.monitor.stall import StallReport
from hsloader.monitor.voice import say
from hsloader.reader.access import Access
from hsloader.reader.client import FeederClient
from tests.monitor.making import row, snapshot
from tests.reader.making import make_client, make_dataset, request_of


def _make_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has configured logging: pytest's own handlers are set aside."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


def _arrives(client: FeederClient, key: int) -> bool:
    # The batch itself must not stay in a frame of the test: it would keep the ring.
    return client.wait(key, 10) is not None


def test_lines_go_to_stderr_until_somebody_listens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_deaf(monkeypatch)
    say("nobody listens")
    assert capsys.readouterr().err == "hsloader: nobody listens\n"
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger = logging.getLogger("hsloader")
    monkeypatch.setattr(logger, "handlers", [Ear()])
    say("a level that is off")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    say("100 % is text, not a format")
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    assert heard == ["100 % is text, not a format"]
    assert capsys.readouterr().err == ""


def test_rank_0_speaks_and_stalls_are_told_by_every_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_deaf(monkeypatch)
    counters = {TrainerCounter.BATCHES: 0, TrainerCounter.EPOCH_BATCHES: 10}
    for rank in (0, 1):
        now = time.monotonic()
        reporter = Reporter(
            lambda now=now: snapshot(time.monotonic() - now, counters), rank=rank, speaks=rank == 0, log_every=0.05
        )
        reporter.epoch_began()
        counters[TrainerCounter.BATCHES] = 1
        reporter.batch_done()
        time.sleep(0.06)
        reporter.batch_done()
        reporter.epoch_ended()
        counters[TrainerCounter.BATCHES] = 0
        said = capsys.readouterr().err
        if rank:
            assert said == ""
        else:
            begun = [" ".join(line.split(",")[0].split()[:3]) for line in said.splitlines() if line.startswith("hsl")]
            assert begun == [
                "hsloader: first batch",
                "hsloader: epoch 0",
                "hsloader: epoch 0",
            ]
        reporter.stalled(12.0)
        said = capsys.readouterr().err
        assert "next() has waited 12 s for batch 1 of 10 of epoch 0" in said
        assert ("rank 1: " in said) == (rank == 1)
        reporter.batch_done()
        assert f"hsloader: {'rank 1: ' if rank else ''}the stall is over: the batch came after 12 s" in (
            capsys.readouterr().err
        )


def test_a_stall_that_was_left_is_not_said_to_be_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_deaf(monkeypatch)
    reporter = Reporter(snapshot, log_every=0.0)
    reporter.stalled(12.0)
    reporter.epoch_began()
    reporter.batch_done()
    assert "the stall is over" not in capsys.readouterr().err


def test_rates_are_over_ten_seconds_or_more() -> None:
    now = 0.0
    reporter = Reporter(lambda: snapshot(now))
    spans = []
    for now in (0.0, 0.01, 5.0, 9.9, 10.5, 12.0, 16.0, 60.0):  # noqa: B007 - read by the reporter
        spans.append(reporter.stats()["window_seconds"])
    assert spans == pytest.approx([100.0, 100.01, 105.0, 109.9, 10.5, 12.0, 11.0, 44.0])


def test_stall_report_names_file_stage_and_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    read = Access.read

    def slow(self: Access, *args: object) -> object:
        go_on.wait(10)
        return read(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Access, "read", slow)
    with (
        make_dataset(tmp_path / "data.hs", samples=4) as dataset,
        make_client(dataset, in_process=True, mode="pread") as client,
    ):
        pieces = [(0, 0, 0, int(dataset.lengths[0]), 0)]
        client.submit(0, request_of(pieces, len(dataset.fields)))
        assert client.wait(0, 0.5) is None
        began = time.monotonic()
        report = StallReport()
        text = report.text(take_snapshot(client.ring.fd), 0.5)
        assert time.monotonic() - began < 2.0
        again = report.text(take_snapshot(client.ring.fd), 0.9)
        go_on.set()
        assert _arrives(client, 0)
    assert "next() has waited 0.50 s for batch 1 of epoch 0" in text
    assert "reading segments/000000/hidden_states/c.0.0.0 at 0 B (" in text.replace("c/0/0/0", "c.0.0.0")
    assert f"{tmp_path / 'data.hs'} is on " in text
    assert "memory: " in text
    assert "kernel wait futex" in text or "waiting for a lock" in text
    assert "starting: the first batch is being read" in again


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="wants a file system that tmp_path is not on")
def test_stall_report_names_the_file_system_behind_a_link(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as real:
        (tmp_path / "link").symlink_to(real)
        with make_dataset(tmp_path / "link" / "data.hs", samples=4) as dataset, make_client(dataset) as client:
            client.submit(0, request_of([(0, 0, 0, int(dataset.lengths[0]), 0)], len(dataset.fields)))
            assert _arrives(client, 0)
            text = StallReport().text(take_snapshot(client.ring.fd), 12.0)
    assert f"{tmp_path / 'link' / 'data.hs'} is on tmpfs" in text


def test_stall_report_and_top_see_a_stopped_feeder(tmp_path: Path) -> None:
    with make_dataset(tmp_path / "data.hs", samples=4) as dataset:
        with make_client(dataset) as client:
            whole = request_of([(0, 0, 0, int(dataset.lengths[0]), 0)], len(dataset.fields))
            client.submit(0, whole)
            assert _arrives(client, 0)
            (ring,) = [ring for ring in find_rings() if ring.owner == os.getpid()]
            assert ring.snapshot.info["dataset"] == str(dataset.path)
            assert ring.snapshot[TrainerCounter.RECEIVED] == 1
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            client.submit(1, whole)
            assert client.wait(1, 0.2) is None
            text = StallReport().text(take_snapshot(client.ring.fd), 0.2)
            assert f"the feeder (pid {client.pid}) is stopped; let it go on with: kill -CONT {client.pid}" in text
            os.kill(client.pid, signal.SIGCONT)
            assert _arrives(client, 1)
            client.submit(2, whole)
            client.submit(3, whole)
            deadline = time.monotonic() + 5
            while (now := take_snapshot(client.ring.fd)).ready < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert (now.ready, now.reading) == (2, 0)
            client.abandon()
            assert take_snapshot(client.ring.fd).ready == 0
        assert not [ring for ring in find_rings() if ring.owner == os.getpid()]


def test_stall_report_sees_a_helper_that_is_stopped() -> None:
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        os.kill(helper.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, helper.pid, os.WSTOPPED | os.WNOWAIT)
        feeder = {FeederCounter.PID: os.getpid(), FeederCounter.HELPERS: helper.pid}
        text = StallReport().text(snapshot(20, feeder=feeder), 12.0)
    finally:
        helper.kill()
        helper.wait()
    assert f"the feeder's helper (pid {helper.pid}) is stopped; let it go on with: kill -CONT {helper.pid}" in text


def test_stall_report_without_anything_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **keywords: object) -> int:
        raise PermissionError

    monkeypatch.setattr("hsloader.monitor.access.os.open", refused)
    monkeypatch.setattr("hsloader.monitor.access.Path.read_text", refused)
    now = snapshot(20, threads=(row(1, Stage.READ, 8.0, "segments/000000/hidden_states/c.0.0.0"),))
    text = StallReport().text(now, 12.0)
    assert "next() has waited 12 s" in text
    assert "reading segments/000000/hidden_states/c.0.0.0 for 12 s" in text
    assert "is gone" not in text.partition("reading")[2]  # what may not be seen may well be there


def test_slowest_rank_is_found_among_the_rings_of_the_job(tmp_path: Path) -> None:
    with make_dataset(tmp_path / "data.hs", samples=4) as dataset:
        own = f"job {os.getpid()}"  # the machine may run these tests twice at a time
        clients = [make_client(dataset) for _ in range(3)]
        try:
            for rank, client in enumerate(clients):
                job = own if rank < 2 else "another"
                client.ring.write_info({**client.ring.info(), "rank": rank, "job": job})
                client.submit(0, request_of([(0, 0, 0, 5, 0)], len(dataset.fields)))
                assert _arrives(client, 0)
            siblings = Siblings(own, 0)
            assert siblings.slowest() is None
            clients[1].counters[TrainerCounter.NEXT_NS] += 10**9
            found = siblings.slowest()
            assert found is not None
            assert (found[0], found[2]) == (1, 2)
            assert found[1] > 0.9
        finally:
            for client in clients:
                client.close()


def test_ranks_that_start_later_are_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rings = 0.0, {}
    searches: list[float] = []

    def add(key: int, rank: int, waited: float) -> None:
        counters = {TrainerCounter.NEXT_NS: int(waited * clock * 1e9)}
        now = snapshot(clock, counters, info={"rank": rank, "job": "mine"})
        rings[str(key)] = FoundRing((0, key), str(key), 1, now)

    def search(pids: object) -> list[FoundRing]:
        searches.append(clock)
        return list(rings.values())

    monkeypatch.setattr(neighbours, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(neighbours, "find_rings", search)
    monkeypatch.setattr(neighbours, "open_ring", lambda path: rings[path])
    siblings = Siblings("mine", 0)
    add(0, 0, 0.0)
    assert siblings.slowest() is None
    found = []
    for clock in (5.0, *range(35, 1500, 30)):  # noqa: B007 - read by what stands in for the clock
        add(0, 0, 0.0)
        add(1, 1, 0.6)
        add(2, 1, 0.0)  # rank 1 has a loader for validation, which waits for nothing
        found.append(siblings.slowest())
    assert found[0] is None  # found just now
    assert found[1:] == [(1, pytest.approx(0.6), 2)] * len(found[1:])
    assert searches[:3] == [0.0, 5.0, 35.0]
    assert len(searches) < 15
    assert min(b - a for a, b in zip(searches[-2:], searches[-1:], strict=False)) >= 300


def test_job_names() -> None:
    assert job_name({}) == ""
    assert job_name({"SLURM_JOB_ID": "77"}) == "77"
    assert job_name({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}) == "none:29500"


def test_stages_are_marked_only_when_asked() -> None:
    calls: list[str] = []
    with stage("next"):
        assert calls == []
    mark_stages(calls.append, lambda: calls.append("end"))
    try:
        with stage("next"), stage("wait"):
            pass
        with pytest.raises(KeyError), stage("send"):
            raise KeyError
    finally:
        mark_stages(None, None)
    assert calls == ["hsloader.next", "hsloader.wait", "end", "end", "hsloader.send", "end"]


def test_a_report_that_fails_is_a_line_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Snapshot:
        raise ValueError("odd kernel")

    reporter = Reporter(broken)
    reporter.stalled(12.0)
    assert "next() has waited 12 s; why could not be found out: ValueError('odd kernel')" in caplog.text
    reporter._read = snapshot
    reporter.batch_done()
    assert "the stall is over: the batch came after 12 s" in caplog.text
