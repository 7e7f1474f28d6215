"""What the client promises: idempotent calls, slots freed in any order, holds, cancellation, honest refusals."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import numpy as np
import pytest

from hsloader.errors import LoaderError
from hsloader.reader.client import FeederClient
from hsloader.reader.counters import TrainerCounter
from hsloader.reader.holds import Holds
from hsloader.reader.lease import Slot
from hsloader.reader.options import ReadOptions
from hsloader.store.dataset import Dataset
from tests.reader.making import (
    assert_filled,
    eventually,
    make_client,
    poison,
    random_request,
    request_of,
    runs,
)


def test_slots_are_freed_in_any_order(usual: Dataset) -> None:
    rng = np.random.default_rng(3)
    with make_client(usual, slots=5) as client:
        poison(client)
        alive: dict[int, Any] = {}
        keys = itertools.count()
        for _ in range(120):
            while client.free and len(alive) < 5:
                key = next(keys)
                alive[key] = random_request(rng, usual)
                assert client.submit(key, alive[key])
            assert client.free == 0
            assert not client.submit(10_000, random_request(rng, usual))
            key = int(rng.choice(list(alive)))
            assert_filled(usual, alive.pop(key), client.wait(key, 20))
            client.done(key)


def test_the_same_key_is_asked_once_and_gives_the_same_batch(usual: Dataset) -> None:
    rng = np.random.default_rng(4)
    with make_client(usual) as client:
        request = random_request(rng, usual)
        assert client.submit(7, request)
        assert client.submit(7, random_request(rng, usual))
        assert client.free == client.slots - 1
        first = client.wait(7, 20)
        assert client.look(7) is not None
        second = client.wait(7)
        assert_filled(usual, request, second)
        assert first is not None
        assert second is not None
        assert first.slot == second.slot
        assert client.stats()["batches_received"] == 1
        client.done(7)
        client.done(7)
        assert 7 not in client
        with pytest.raises(KeyError):
            client.wait(7)


def test_holds_keep_a_slot(usual: Dataset) -> None:
    class Owner:
        pass

    with make_client(usual, slots=3) as client:
        request = random_request(np.random.default_rng(5), usual)
        client.submit(0, request)
        filled = client.wait(0, 20)
        owner = Owner()
        client.hold(0, owner)
        number = client.hold(0)
        client.done(0)
        client.abandon()
        assert (client.held, client.free) == (1, 2)
        assert_filled(usual, request, filled)
        client.release(number)
        client.release(number)
        assert client.free == 2
        del owner
        gc.collect()
        assert (client.held, client.free) == (0, 3)


def test_views_outlive_the_client(usual: Dataset) -> None:
    client = make_client(usual)
    request = random_request(np.random.default_rng(6), usual)
    client.submit(0, request)
    filled = client.wait(0, 20)
    client.close()
    assert_filled(usual, request, filled)
    client.close()
    with pytest.raises(LoaderError, match="closed"):
        client.submit(1, request)
    with pytest.raises(LoaderError, match="closed"):
        client.wait(0)


def test_abandon_cancels_and_frees(usual: Dataset) -> None:
    rng = np.random.default_rng(7)
    with make_client(usual, slots=4) as client:
        poison(client)
        for round_ in range(40):
            while client.free:
                client.submit(int(client.counters[TrainerCounter.REQUESTED]), random_request(rng, usual))
            client.abandon()
            assert client.wait_free(10)
            request = random_request(rng, usual)
            assert client.submit(0, request)
            assert_filled(usual, request, client.wait(0, 20))
            client.done(0)
            assert round_ not in client
        assert eventually(lambda: client.free == 4)


def test_a_stopped_feeder_is_a_timeout(usual: Dataset) -> None:
    with make_client(usual) as client:
        request = random_request(np.random.default_rng(8), usual)
        client.submit(0, request)
        assert_filled(usual, request, client.wait(0, 20))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        client.submit(1, request)
        begun = time.monotonic()
        assert client.wait(1, 0.3) is None
        assert 0.25 < time.monotonic() - begun < 2
        assert client.look(1) is None
        os.kill(client.pid, signal.SIGCONT)
        assert_filled(usual, request, client.wait(1, 20))
        assert client.restarts == 0
        os.kill(client.pid, signal.SIGSTOP)  # close() must end it all the same


def test_ctrl_c_in_wait(usual: Dataset) -> None:
    with make_client(usual) as client:
        client.start()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        request = random_request(np.random.default_rng(9), usual)
        client.submit(0, request)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            client.wait(0)
        timer.join()
        os.kill(client.pid, signal.SIGCONT)
        assert_filled(usual, request, client.wait(0, 20))


class _InterruptedError(Exception):
    pass


# An interrupt that lands in a finalizer, of whatever object, is swallowed by Python and told as unraisable.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_anywhere(usual: Dataset) -> None:
    """Every call may be cut short at any bytecode; the calls made again give the same batches."""
    rng = np.random.default_rng(10)
    count = [0]

    def interrupt(signum: int, frame: FrameType | None) -> None:
        count[0] += 1
        raise _InterruptedError

    with make_client(usual, slots=4) as client:
        client.start()
        requests = [random_request(rng, usual) for _ in range(12)]
        previous = signal.signal(signal.SIGALRM, interrupt)
        position = 0
        try:
            while position < 250:
                try:
                    signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(0.0001, 0.004)))
                    for ahead in range(position, position + 3):
                        client.submit(ahead, requests[ahead % 12])
                    filled = client.wait(position, 20)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    assert_filled(usual, requests[position % 12], filled)
                    position += 1
                    signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(0.00001, 0.0005)))
                    client.done(position - 1)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except _InterruptedError:
                    client.done(position - 1)
                    continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert count[0] > 20
        client.abandon()
        assert eventually(lambda: client.free == 4)


def test_a_budget_under_three_batches(usual: Dataset) -> None:
    with pytest.raises(ValueError, match=r"12,287 bytes.*4,096 bytes.*room for three.*prefetch=12288"):
        FeederClient(usual, ["input_ids"], slot_bytes=4000, budget=12287)
    with pytest.raises(ValueError, match="bytes of memory are available"):
        FeederClient(usual, ["input_ids"], slot_bytes=4000, budget=1 << 60)
    with FeederClient(usual, ["input_ids"], slot_bytes=4000, budget=12288) as client:
        assert client.slots == 3
    with pytest.raises(ValueError, match="no field"):
        FeederClient(usual, ["input_idz"], slot_bytes=4000, budget=12288)


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 0},
        {"io_threads": 1000},
        {"mode": "fast"},
        {"prefetch": 10},
        {"restarts": -1},
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ReadOptions(**wrong)


@pytest.mark.parametrize("wrong", [{"threads": 1.5}, {"prefetch": "1GiB"}, {"in_process": None}, {"drop_pages": 1}])
def test_options_of_the_wrong_type(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="expected"):
        ReadOptions(**wrong)


@pytest.mark.parametrize("in_process", [False, True])
def test_nothing_grows(usual: Dataset, in_process: bool) -> None:
    """Descriptors, threads and feeders stay the same over hundreds of batches and new iterations."""
    rng = np.random.default_rng(11)
    with make_client(usual, in_process=in_process) as client:
        requests = [random_request(rng, usual) for _ in range(8)]

        def iterate(count: int) -> None:
            client.abandon()
            for key in range(count):
                for ahead in range(key, key + 3):
                    client.submit(ahead, requests[ahead % 8])
                assert client.wait(key, 20) is not None
                client.done(key)

        def sizes() -> tuple[int, ...]:
            feeder = f"/proc/{client.pid}"
            own = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
            return (*own, len(os.listdir(feeder + "/fd")), len(os.listdir(feeder + "/task")))

        iterate(60)
        before, pid = sizes(), client.pid
        for _ in range(5):
            iterate(60)
        assert sizes() == before
        assert client.pid == pid


def test_collection_ends_the_feeder(usual: Dataset) -> None:
    client = make_client(usual)
    client.start()
    pid = client.pid
    assert pid is not None
    assert runs(pid)
    del client
    gc.collect()
    assert not runs(pid)


def test_stats_say_what_was_read(usual: Dataset) -> None:
    with make_client(usual) as client:
        client.submit(0, request_of([(0, 0, 0, int(usual.lengths[0]), 0)], 4))
        client.wait(0, 20)
        stats = client.stats()
        assert stats["batches_filled"] == stats["batches_received"] == 1
        assert stats["decoded_bytes"] >= int(usual.lengths[0]) * 3 * 64 * 2
        assert 0 < stats["frame_bytes"] <= stats["read_bytes"]
        assert stats["decode_seconds"] > 0
        assert stats["zeroed_bytes"] > 0
        info = client.ring.info()
        assert info["dataset"] == str(usual.path)
        assert info["mode"] == client.mode == "mmap"


def test_a_hold_that_ends_while_ctrl_c_comes_frees_its_slot() -> None:
    """Interrupts that fall between any two steps of taking in what was released."""
    holds, slot = Holds(), Slot(None, 1, 0)  # type: ignore[arg-type]

    class Bitten(dict[int, Slot]):
        bites = 0

        def pop(self, *arguments: Any) -> Any:
            Bitten.bites += 1
            if Bitten.bites in (1, 4):
                raise KeyboardInterrupt  # before it is done
            found = super().pop(*arguments)
            if Bitten.bites in (2, 6):
                raise KeyboardInterrupt  # and after
            return found

    holds._slots, holds._owners = Bitten(), Bitten()  # type: ignore[assignment]
    owner = threading.Event()
    holds.hold(slot, owner)
    number = holds.hold(slot, None)
    holds.release(number)
    del owner
    for _ in range(20):
        with contextlib.suppress(KeyboardInterrupt):
            holds.collect()
    assert not slot.holds
    assert not list(holds.slots)
    holds.release(number)
    holds.collect()
