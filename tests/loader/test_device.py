"""Transfers against a make-believe CUDA that runs late: what is reused too early is seen."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import hsloader.loading.delivery as delivery_module
import hsloader.loading.settings as settings_module
from hsloader import DataLoader, UniformNoise
from hsloader.device.driver import CudaDriver
from hsloader.errors import LoaderError
from hsloader.monitor.header import take_snapshot
from hsloader.store.dataset import Dataset
from tests.loader.making import PACKED, PADDED, RAW, assert_same, clone, reference


class Mark:
    """One record of an event."""

    done = False


class LateEvent:
    """Recorded again, it has a new mark; who waits for the old one goes on waiting for that, as in CUDA."""

    mark: Mark | None = None


class LateStream:
    """A queue of work that runs only when somebody lets it."""

    def __init__(self) -> None:
        self.queue: list[tuple[str, Any]] = []

    def step(self) -> bool:
        """Do the first thing in the queue, unless it waits for an event."""
        if not self.queue:
            return False
        kind, what = self.queue[0]
        if kind == "wait" and what is not None and not what.done:
            return False
        self.queue.pop(0)
        if kind == "run":
            what()
        elif kind == "record":
            what.done = True
        return True


class LateDriver:
    """As ``Driver`` demands.  "Device" memory is host memory; freed blocks are poisoned and given out again."""

    def __init__(self) -> None:
        self.side = LateStream()
        self.main = LateStream()
        self.now = self.main
        self.others: list[LateStream] = []
        self.capturing = False
        self.moves = False  # whether the device gets on while it is looked at
        self.registered: set[int] = set()
        self.used: list[tuple[torch.Tensor, LateStream]] = []
        self.uuid = ""

    def check_not_capturing(self) -> None:
        if self.capturing:
            raise LoaderError("capture")

    def current(self) -> LateStream:
        return self.now

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        tensor.view(torch.uint8).fill_(0xEE)
        return tensor

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def event(self, *, timed: bool = False) -> LateEvent:
        return LateEvent()

    def record(self, event: LateEvent, stream: LateStream) -> None:
        event.mark = Mark()
        stream.queue.append(("record", event.mark))

    def wait(self, stream: LateStream, event: LateEvent) -> None:
        stream.queue.append(("wait", event.mark))

    def run(self, stream: LateStream, work: Callable[[], None]) -> None:
        stream.queue.append(("run", work))

    def completed(self, event: LateEvent) -> bool:
        assert not self.capturing, "CUDA forbids this during capture"
        if self.moves:
            self.progress()
        return event.mark is not None and event.mark.done

    def synchronize(self, event: LateEvent) -> None:
        while not self.completed(event):
            assert self.progress(), "a deadlock"

    def milliseconds(self, first: LateEvent, last: LateEvent) -> float:
        return 1.0

    def used_on(self, tensor: torch.Tensor, stream: LateStream) -> None:
        self.used.append((tensor, stream))

    def generator(self, seed: int) -> torch.Generator:
        generator = torch.Generator()
        return generator.manual_seed(seed)

    def register(self, memory: np.ndarray[Any, Any]) -> None:
        assert memory.ctypes.data not in self.registered, "registered twice"
        self.registered.add(memory.ctypes.data)

    def unregister(self, memory: np.ndarray[Any, Any]) -> None:
        self.registered.remove(memory.ctypes.data)

    def progress(self) -> bool:
        """Let the device do one thing."""
        return any(stream.step() for stream in (self.side, self.main, *self.others))

    def drain(self) -> None:
        while self.progress():
            pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDriver]:
    driver = LateDriver()
    monkeypatch.setattr(delivery_module, "CudaDriver", lambda device: driver)
    monkeypatch.setattr(settings_module, "demand_device", lambda device: None)
    yield driver
    assert not driver.registered, "the ring was unmapped before it was unregistered"


@pytest.mark.parametrize("settings", [PACKED, {**PACKED, "trainer": "speculators-0.4"}, PADDED, RAW])
def test_batches_are_those_of_the_cpu(dataset: Dataset, driver: LateDriver, settings: dict[str, Any]) -> None:
    with DataLoader(dataset, device="cuda", **settings) as loader:
        for epoch in range(2):
            plan = loader.batch_sampler._generate_batches(epoch)
            for batch, samples in zip(loader, plan, strict=True):
                driver.drain()
                assert_same(batch, reference(dataset, samples, settings))


def test_a_slot_is_not_reused_before_its_copy_ran(dataset: Dataset, driver: LateDriver) -> None:
    """The device runs as late as it can: a slot given back early would be overwritten by the feeder."""
    random.seed(0)
    with DataLoader(dataset, device="cuda", **{**PACKED, "max_tokens": 120}) as loader:
        held = []
        for epoch in range(6):
            plan = loader.batch_sampler._generate_batches(epoch)
            batches = iter(loader)
            for samples in plan:
                held.append((next(batches), samples))
                client = loader._connection.client  # type: ignore[union-attr]
                while client.free == 0 and driver.side.queue:
                    driver.progress()  # else the next batch could not come: the device must do something
                for _ in range(random.randrange(4)):
                    driver.progress()
        driver.drain()
        for batch, samples in held:
            expected = reference(dataset, samples, {**PACKED, "max_tokens": 120})
            assert_same(batch, expected)


def test_one_batch_ahead_and_slots_come_back(dataset: Dataset, driver: LateDriver) -> None:
    with DataLoader(dataset, device="cuda", **PACKED) as loader:
        batches = iter(loader)
        batch = next(batches)
        connection = loader._connection
        assert connection is not None
        transfers = connection.delivery._transfers  # type: ignore[attr-defined]
        assert 1 <= transfers.moving <= 2
        assert 1 <= connection.client.held <= 2
        driver.drain()
        del batch
        next(batches)
        assert transfers.moving <= 2
        assert connection.client.stats()["batches_requested"] >= 3
        assert loader.stats()["transfer_seconds"] > 0
        driver.drain()


def test_every_byte_that_travels_is_counted(dataset: Dataset, driver: LateDriver) -> None:
    """Only some transfers are timed."""
    driver.moves = True
    with DataLoader(dataset, device="cuda", **PACKED) as loader:
        before = {"transfer_bytes": 0.0, "transfer_seconds": 0.0}
        for _ in range(3):
            for batch in loader:
                states = batch["hidden_states"].nbytes + batch["verifier_last_hidden_states"].nbytes
            driver.drain()
            loader._connection.delivery._transfers.retire()  # type: ignore[union-attr]
            after = loader.stats()
            count = len(loader.batch_sampler)
            sent = after["transfer_bytes"] - before["transfer_bytes"]
            assert states * count < sent < states * (count + 1)
            assert after["transfer_seconds"] > before["transfer_seconds"]
            before = after


def test_a_batch_that_is_dropped_unseen_keeps_its_slot(dataset: Dataset, driver: LateDriver) -> None:
    with DataLoader(dataset, device="cuda", **PACKED) as loader:
        client = loader._connection.client  # type: ignore[union-attr]
        while client.stats()["batches_filled"] < client.slots:
            time.sleep(0.001)
        for _ in loader:
            break  # one more is under way
        gc.collect()
        assert client.held == 2
        driver.moves = True
        for _ in range(4):
            for _ in loader:
                break  # the slots are all under way, and must come back while the next batch waits for one
        driver.drain()
        plan = loader.batch_sampler._generate_batches(5)
        got = []
        for batch in loader:
            driver.drain()
            got.append(clone(batch))
        for batch, samples in zip(got, plan, strict=True):
            assert_same(batch, reference(dataset, samples, PACKED))


def test_another_stream_at_hand_out_is_told_to_the_allocator(dataset: Dataset, driver: LateDriver) -> None:
    with DataLoader(dataset, device="cuda", **PACKED) as loader:
        batches = iter(loader)
        next(batches)
        assert not driver.used
        driver.drain()
        connection = loader._connection
        assert connection is not None
        ahead = bool(connection.delivery._ahead)  # type: ignore[attr-defined]
        driver.now = LateStream()
        driver.others.append(driver.now)
        next(batches)
        assert bool(driver.used) == ahead
        assert all(stream is driver.now for _, stream in driver.used)
        driver.drain()


def test_graph_capture_is_refused_and_costs_nothing(dataset: Dataset, driver: LateDriver) -> None:
    with DataLoader(dataset, device="cuda", **PACKED) as loader:
        plan = loader.batch_sampler._generate_batches(0)
        batches = iter(loader)
        got = [clone(next(batches))]
        driver.capturing = True
        with pytest.raises(LoaderError):
            next(batches)
        driver.capturing = False
        for batch in batches:
            driver.drain()
            got.append(clone(batch))
        assert len(got) == len(plan)


def test_noise_is_that_of_its_batch(dataset: Dataset, driver: LateDriver) -> None:
    settings = {**PACKED, "noise": UniformNoise(0.05)}
    with DataLoader(dataset, **settings) as loader:
        wanted = [clone(batch) for batch in loader]
    with DataLoader(dataset, device="cuda", **settings) as loader:
        for batch, theirs in zip(loader, wanted, strict=True):
            driver.drain()
            assert_same(batch, theirs)


def test_a_loader_that_is_only_collected_unregisters_first(dataset: Dataset, driver: LateDriver) -> None:
    loader = DataLoader(dataset, device="cuda", **PACKED)
    next(iter(loader))
    assert driver.registered
    driver.drain()  # this driver's queue keeps the transfers alive, a device does not
    del loader
    gc.collect()
    assert not driver.registered


def test_a_slot_is_free_for_the_next_request_once_its_copy_is_over(dataset: Dataset, driver: LateDriver) -> None:
    with DataLoader(dataset, device="cuda", **{**PACKED, "max_tokens": 120}) as loader:
        batches = iter(loader)
        client = loader._connection.client  # type: ignore[union-attr]
        for _ in range(6):
            next(batches)
            driver.drain()
            assert client.free == 0  # all are asked for, filled, or the one batch ahead
        driver.drain()


def test_an_interrupt_anywhere_in_a_transfer_loses_nothing(
    dataset: Dataset, driver: LateDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also no slot, no registration, and no memory that the device still writes to."""
    fuse = [0]

    def burning(call: Callable[..., Any]) -> Callable[..., Any]:
        def burn(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            fuse[0] -= 1
            if fuse[0] == 0:
                raise KeyboardInterrupt
            return result

        return burn

    for name in ("current", "empty", "pinned", "event", "record", "wait", "run", "register"):
        monkeypatch.setattr(driver, name, burning(getattr(driver, name)))
    driver.moves = True
    settings = {**PACKED, "trainer": "speculators-0.4", "max_tokens": 120, "noise": UniformNoise(0.05)}
    with DataLoader(dataset, **settings) as loader:
        wanted = [clone(batch) for batch in loader]
    interrupts = 0
    with DataLoader(dataset, device="cuda", **settings) as loader:
        monkeypatch.setattr(driver, "register", lambda memory: driver.registered.add(memory.ctypes.data))
        for length in range(1, 24):
            loader.set_epoch(0)
            batches, got = iter(loader), []
            for _ in wanted:
                fuse[0] = length
                try:
                    batch = next(batches)
                except KeyboardInterrupt:
                    interrupts += 1
                    fuse[0] = 0
                    transfers = loader._connection.delivery._transfers  # type: ignore[union-attr]
                    under_way = sum(kind == "run" for kind, _ in driver.side.queue)
                    assert under_way <= transfers.moving  # whose memory and slots are kept
                    batch = next(batches)
                got.append(batch)
            driver.drain()
            assert_same(got, wanted)
        assert interrupts > 50
        connection = loader._connection
        assert connection is not None
        connection.delivery._transfers.retire()  # type: ignore[attr-defined]
        del batch, batches
        gc.collect()
        assert connection.client.held == 0


def test_a_ring_that_was_replaced_is_unregistered_once_nothing_moves_from_it(
    dataset: Dataset, driver: LateDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a feeder that hung in the kernel: else both rings stay pinned until the loader closes."""
    settings = {**PACKED, "max_tokens": 120}
    with DataLoader(dataset, device="cuda", **settings) as loader:
        client = loader._connection.client  # type: ignore[union-attr]
        while client.stats()["batches_filled"] < client.slots:
            time.sleep(0.001)
        plan = loader.batch_sampler._generate_batches(0)
        batches = iter(loader)
        got = [next(batches)]
        os.kill(client.pid, signal.SIGKILL)  # type: ignore[arg-type]
        monkeypatch.setattr(client._state.host, "stuck", lambda: True)
        client._recover_if_dead()
        transfers = loader._connection.delivery._transfers  # type: ignore[union-attr]
        memory = transfers._memory

        def one_ends() -> None:
            driver.synchronize(memory.moving[0].gear.done)
            transfers.retire()

        one_ends()  # else there is no room to ask for anything in the new ring
        for _ in range(4):  # three that the old ring still had, and one of the new
            got.append(next(batches))
        old = [parcel.place for parcel in memory.moving if parcel.place[0] == 1]
        assert len(old) == 3
        transfers.retire()
        assert {place for place in memory.registered if place[0] == 1} == set(old)
        one_ends()
        assert {place for place in memory.registered if place[0] == 1} == set(old[1:])
        driver.drain()
        transfers.retire()
        assert {ring for ring, _ in memory.registered} == {2}
        assert driver.registered == {slot.ctypes.data for slot, _ in memory.registered.values()}
        for batch in batches:
            driver.drain()
            got.append(batch)
        assert_same(got, [reference(dataset, samples, settings) for samples in plan])


def test_the_ring_says_which_gpu_it_is_from_the_first_batch_on(dataset: Dataset, driver: LateDriver) -> None:
    driver.uuid = "5ca1ab1e-0000-0000-0000-000000000001"
    with DataLoader(dataset, device="cuda", **PACKED) as loader:
        client = loader._connection.client  # type: ignore[union-attr]
        before = take_snapshot(client.ring.fd).info
        assert "gpu" not in before  # CUDA is not touched yet
        next(iter(loader))
        assert take_snapshot(client.ring.fd).info == {**before, "gpu": driver.uuid}
        driver.drain()


def test_a_forked_child_leaves_the_parents_transfers_alone(dataset: Dataset, driver: LateDriver) -> None:
    with DataLoader(dataset, device="cuda", **PACKED) as loader:
        next(iter(loader))
        memory = loader._connection.delivery._transfers._memory  # type: ignore[union-attr]
        child = delivery_module.Transfers(driver, (), None, lambda *_: None)
        child._memory.owner = -1
        child._memory.moving, child._memory.registered = list(memory.moving), dict(memory.registered)
        queued = len(driver.side.queue)
        child.close()
        assert driver.registered
        assert len(driver.side.queue) == queued
        driver.drain()


def test_a_cuda_that_is_broken_keeps_nothing_open(
    dataset: Dataset, driver: LateDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of the script has failed: from then on every call raises, the one that waits in close() too."""
    loader = DataLoader(dataset, device="cuda", **PACKED)
    next(iter(loader))
    client = loader._connection.client  # type: ignore[union-attr]

    def broken(event: LateEvent) -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(driver, "synchronize", broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        loader.close()
    assert client._state.closed
    assert not driver.registered
    loader.close()
    driver.drain()


class Cudart:
    """Registers as CUDA does: an address that is registered is refused."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.known: set[int] = set()
        self.calls: list[str] = []
        self._stubborn = stubborn

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append("register")
        if address in self.known:
            return 712
        self.known.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        if not self._stubborn:
            self.known.discard(address)
        return 0


def test_memory_that_counts_as_registered_is_registered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of an older ring at the same address would be read instead of this one.

    And the script's next kernel must not report the failed call as its own.
    """
    driver = CudaDriver.__new__(CudaDriver)
    driver.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    memory = np.zeros(4096, np.uint8)
    for stubborn in (False, True):
        cudart = Cudart(stubborn=stubborn)
        monkeypatch.setattr(torch.cuda, "cudart", lambda cudart=cudart: cudart)
        monkeypatch.setattr(driver, "_forget_error", lambda cudart=cudart: cudart.calls.append("forget"))
        driver.register(memory)
        assert cudart.calls == ["register"]
        if stubborn:
            with pytest.raises(LoaderError, match="CUDA error 712"):
                driver.register(memory)
        else:
            driver.register(memory)
        assert cudart.calls[1:5] == ["register", "unregister", "register", "forget"]
        driver.unregister(memory)
        assert cudart.calls[-1] == "unregister"
