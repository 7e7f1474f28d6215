"""A feeder of several processes: they share the requests, live and die together, and leave nobody behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from hsloader.monitor.counters import FeederCounter, ThreadCounter
from hsloader.monitor.header import take_snapshot
from hsloader.reader.client import FeederClient
from hsloader.store.dataset import Dataset
from tests.reader.making import assert_filled, eventually, make_client, poison, random_request, runs
from tests.reader.test_faults import script


def helpers(client: FeederClient) -> list[int]:
    """The helpers' process ids, once they are there."""
    places = client.ring.feeder[FeederCounter.HELPERS : FeederCounter.HELPERS + 3]
    assert eventually(lambda: bool(client.ring.feeder[FeederCounter.READY_AT]))
    return [int(pid) for pid in places if pid]


def go_through(client: FeederClient, dataset: Dataset, count: int, seed: int = 0) -> None:
    """Read batches, three ahead."""
    rng = np.random.default_rng(seed)
    requests = [random_request(rng, dataset) for _ in range(count)]
    client.abandon()
    for key, request in enumerate(requests):
        for ahead in range(key, min(count, key + 3)):
            client.submit(ahead, requests[ahead])
        assert_filled(dataset, request, client.wait(key, 30))
        client.done(key)


@pytest.mark.parametrize(
    ("threads", "slots", "expected"), [(1, 8, 0), (2, 8, 1), (2, 3, 0), (5, 8, 1), (6, 8, 2), (16, 8, 3), (16, 4, 1)]
)
def test_how_many_there_are(usual: Dataset, threads: int, slots: int, expected: int) -> None:
    """Two decode threads a process at least, and two slots: a process without a batch to fill is of no use."""
    with make_client(usual, slots=slots, threads=threads) as client:
        client.start()
        assert len(helpers(client)) == expected


def test_they_share_the_work(usual: Dataset) -> None:
    with make_client(usual, slots=8, threads=17) as client:
        poison(client)
        go_through(client, usual, 30)
        pids = helpers(client)
        assert len(pids) == 3
        assert all(runs(pid) for pid in pids)
        rows = client.ring.threads
        assert {int(row[ThreadCounter.PROCESS]) for row in rows} == {client.pid, *pids}
        assert [int((rows[:, ThreadCounter.KIND] == kind).sum()) for kind in (1, 2)] == [8, 17]
        for pid in (client.pid, *pids):
            mine = rows[rows[:, ThreadCounter.PROCESS] == pid]
            assert mine[:, ThreadCounter.FRAMES].sum() > 0
            assert {int(tid) for tid in mine[:, ThreadCounter.TID]} <= {int(t) for t in os.listdir(f"/proc/{pid}/task")}
        assert client.stats()["batches_filled"] == 30
        assert take_snapshot(client.ring.fd)[FeederCounter.TAKEN] == 30
        for _ in range(3):
            client.abandon()
            go_through(client, usual, 6, seed=1)
    assert not any(runs(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_dying_helper_takes_the_feeder_along(
    usual: Dataset, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    with make_client(usual, threads=16) as client:
        go_through(client, usual, 4)
        (helper,), feeder = helpers(client), client.pid
        os.kill(helper, number)
        go_through(client, usual, 6, seed=1)
        assert client.restarts == 1
        assert client.pid != feeder
        assert feeder is not None
        assert not runs(feeder)
        assert not runs(helper)
        assert helpers(client) != [helper]
    words = caplog.records[-1].getMessage()
    assert number.name in words
    assert f"helper process {helper}" in words


def test_a_dying_feeder_takes_its_helpers_along(usual: Dataset) -> None:
    with make_client(usual, slots=8, threads=24) as client:
        go_through(client, usual, 4)
        old = helpers(client)
        assert len(old) == 3
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        go_through(client, usual, 6, seed=1)
        assert client.restarts == 1
        assert not any(runs(pid) for pid in old)


def test_a_helper_that_stays_gets_the_ring_replaced(usual: Dataset) -> None:
    """As if a helper hung in the kernel: an old process of that name keeps its place in the header."""
    with make_client(usual, threads=16) as client:
        go_through(client, usual, 4)
        first = client.ring
        stays = os.fork()
        if not stays:
            Path("/proc/self/comm").write_text("hsl-feeder")
            signal.pause()
            os._exit(0)
        try:
            assert eventually(lambda: Path(f"/proc/{stays}/comm").read_text() == "hsl-feeder\n")
            (helper,) = helpers(client)
            first.feeder[FeederCounter.HELPERS] = stays
            os.kill(helper, signal.SIGKILL)
            go_through(client, usual, 6, seed=1)
            assert client.ring is not first
        finally:
            os.kill(stays, signal.SIGKILL)
            os.waitpid(stays, 0)


def test_a_killed_trainer_ends_them_all(usual: Dataset) -> None:
    before = (
        "client.close(); client = make_client(dataset, threads=16); request = random_request(np.random.default_rng(0), "
        "dataset); client.submit(0, request); client.wait(0); print(client.ring.feeder[16], flush=True)"
    )
    with script(usual, before, "time.sleep(60)") as trainer:
        assert trainer.stdout is not None
        found = [int(trainer.stdout.readline()) for _ in range(2)]
        assert all(runs(pid) for pid in found)
        trainer.kill()
        assert eventually(lambda: not any(runs(pid) for pid in found), 1.0)
        trainer.wait(10)
