"""Byte ranges through every way to read, at odd places; what a short file says; what is dropped is out of the cache."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hsloader.errors import DamageError
from hsloader.monitor.counters import TrainerCounter
from hsloader.reader import access
from hsloader.reader.access import Access, Buffer, OpenShard, OpenShards
from hsloader.reader.modes import supports_direct
from hsloader.reader.ring import Ring, RingShape, Status
from hsloader.reader.serving import Idle
from hsloader.store.dataset import Dataset
from hsloader.store.stored_segment import ShardHandle

SIZE = (9 << 20) + 1234
RANGES = [(0, 1), (5, 4096), (4095, 4097), (1 << 20, (5 << 20) + 7), (SIZE - 100, SIZE), (0, SIZE)]


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(0).bytes(SIZE)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "c.0"
    file.write_bytes(content)
    return file


def opened(path: Path, mode: str, large: bool) -> OpenShard:
    if mode == "direct" and not supports_direct(path):
        pytest.skip("this file system has no O_DIRECT")
    fd = access.os.open(path, access.os.O_RDONLY)
    return OpenShard(ShardHandle(path, fd, path.stat().st_size, np.empty((0, 2), np.uint64)), mode, large)


@pytest.mark.parametrize(
    ("mode", "large", "drop"), list(itertools.product(["mmap", "pread", "direct"], [False, True], [False, True]))
)
def test_ranges(path: Path, content: bytes, mode: str, large: bool, drop: bool) -> None:
    shard, way, buffer = opened(path, mode, large), Access(mode, drop), Buffer()
    for start, stop in RANGES:
        data = way.read(shard, start, stop, buffer)
        assert data.tobytes() == content[start:stop]
        way.consumed(shard, start, stop, True)


@pytest.mark.parametrize("mode", ["mmap", "pread", "direct"])
def test_a_file_that_ends_early(path: Path, mode: str) -> None:
    shard, way, buffer = opened(path, mode, False), Access(mode, False), Buffer()
    access.os.truncate(path, (2 << 20) + 100)
    assert len(way.read(shard, 0, 2 << 20, buffer)) == 2 << 20
    for start, stop in (((2 << 20) - 50, (2 << 20) + 5000), (1 << 20, 3 << 20), (5 << 20, 6 << 20)):
        with pytest.raises(DamageError, match=r"c\.0.*expected 9,438,418 bytes, found 2,097,252"):
            way.read(shard, start, stop, buffer)


def test_an_old_kernel_has_no_populate(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_POPULATE_READ", 9999)
    shard, way = opened(path, "mmap", False), Access("mmap", False)
    assert way.read(shard, 5, 9000, Buffer()).tobytes() == content[5:9000]
    assert way.read(shard, 5, 9000, Buffer()).tobytes() == content[5:9000]


def in_cache(path: Path) -> int:
    """Pages of a file in the page cache."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        where = np.frombuffer(pages, np.uint8)
        found = np.zeros(-(-len(where) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None)
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        assert libc.mincore(where.ctypes.data, len(where), found.ctypes.data) == 0
        return int((found & 1).sum())


@pytest.mark.parametrize(("mode", "large"), [("mmap", False), ("mmap", True), ("pread", False)])
def test_dropped_pages_leave_the_cache(path: Path, mode: str, large: bool) -> None:
    fd = access.os.open(path, access.os.O_RDONLY)
    access.os.fsync(fd)  # a dirty page is never dropped
    access.os.close(fd)
    shard, way, buffer = opened(path, mode, large), Access(mode, True), Buffer()
    whole = in_cache(path)
    if not whole:
        pytest.skip("the file is not cached here")
    for start in range(0, SIZE, 1 << 20):
        stop = min(SIZE, start + (1 << 20))
        way.read(shard, start, stop, buffer)
        way.consumed(shard, start, stop, stop == SIZE)
    assert in_cache(path) == 0
    way.read(shard, 3 << 20, (3 << 20) + 5, buffer)
    way.consumed(shard, 3 << 20, (3 << 20) + 5, True)
    assert in_cache(path) == 0


def test_what_is_in_memory_needs_no_reading(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, way, buffer = opened(path, "mmap", False), Access("mmap", True), Buffer()
    way.read(shard, 0, SIZE, buffer)
    found = way.resident(shard, 5000, 3 << 20)
    assert found is not None
    assert found.tobytes() == content[5000 : 3 << 20]
    with path.open("rb") as file:
        access.os.fsync(file.fileno())
    way.consumed(shard, 0, SIZE, True)
    assert way.resident(shard, 0, SIZE) is None
    way.read(shard, 4 << 20, (4 << 20) + 10, buffer)
    assert way.resident(shard, 4 << 20, (4 << 20) + 10) is not None
    assert way.resident(shard, 0, (4 << 20) + 10) is None
    monkeypatch.setattr(access.os, "geteuid", lambda: -1)
    monkeypatch.setattr(access.os, "access", lambda path, mode: False)
    assert not opened(path, "mmap", False).tells  # the kernel would say that all of it is there
    access.os.truncate(path, 4 << 20)
    assert way.resident(shard, 4 << 20, (4 << 20) + 10) is None


def test_few_shards_stay_open(usual: Dataset) -> None:
    shards = OpenShards("mmap", capacity=3)
    arrays = [(array, number) for array in _arrays(usual) for number in range(array.shards)]
    assert len(arrays) > 4
    held = shards.get(*arrays[0], 40)
    for array, number in arrays:
        found = shards.get(array, number, 40)
        assert found.path == array.shard_path(number)
        assert len(shards) <= 3
    assert shards.find(*arrays[0]) is None
    assert held.map is not None
    assert held.map[:1].size  # a shard that somebody holds stays mapped
    assert shards.get(*arrays[-1], 40) is shards.find(*arrays[-1])
    shards.forget(*arrays[-1])
    assert shards.find(*arrays[-1]) is None
    del held, found
    shards.clear()
    gc.collect()


def _arrays(dataset: Dataset) -> Iterator[access.ArrayInfo]:
    for segment in dataset.segments:
        for name in dataset.fields:
            yield segment.array(name)


def test_a_trainer_that_asks_for_nothing_is_told_of_ever_more_seldom() -> None:
    ring = Ring.create(RingShape(slots=1, slot_bytes=4096, area_bytes=64, threads=1))
    said: list[str] = []
    idle = Idle(60.0, said.append)

    def after(seconds: float) -> int:
        ring.trainer[TrainerCounter.LAST_CALL] = time.monotonic_ns() - int(seconds * 1e9)
        idle._call = int(ring.trainer[TrainerCounter.LAST_CALL])
        idle.look(ring)
        return len(said)

    idle.look(ring)
    assert after(100) == 0  # nothing is ready
    idle = Idle(60.0, said.append)
    ring.write_request(0, 1, 0, 0, b"")
    request = ring.request(0)
    assert request is not None
    ring.write_completion(0, request, Status.FILLED, bad=0, blob=b"", times=(1, 2), decoded=0)
    assert [after(s) for s in (10, 55, 61, 100, 290, 301, 900, 1600)] == [0, 0, 1, 1, 1, 2, 2, 3]
    assert "has not asked for a batch for 61 s; 1 are ready" in said[0]
    ring.trainer[TrainerCounter.LAST_CALL] = time.monotonic_ns()
    idle.look(ring)
    assert after(61) == 4


@pytest.mark.parametrize("bypass", ["busy", "always"])
def test_what_is_not_in_memory_goes_past_the_page_cache(path: Path, content: bytes, bypass: access.Bypass) -> None:
    if not supports_direct(path):
        pytest.skip("this file system has no O_DIRECT")
    fd = access.os.open(path, access.os.O_RDONLY)
    access.os.fsync(fd)
    access.os.posix_fadvise(fd, 0, 0, access.os.POSIX_FADV_DONTNEED)
    handle = ShardHandle(path, fd, path.stat().st_size, np.empty((0, 2), np.uint64))
    shard, way, buffer = OpenShard(handle, "mmap", False, True), Access("mmap", False, bypass), Buffer()
    if not shard.tells or way.resident(shard, 0, SIZE) is not None:
        pytest.skip("the file is in memory here")
    for start, stop in ((5, 3 << 20), (SIZE - (1 << 20), SIZE)):
        assert way.read(shard, start, stop, buffer).tobytes() == content[start:stop]
        assert way.resident(shard, start, stop) is None
    for _ in range(100):
        way.arrived(True)  # the decoders wait for the disk
    assert way.read(shard, 5, 3 << 20, buffer).tobytes() == content[5 : 3 << 20]
    assert (way.resident(shard, 5, 3 << 20) is not None) == (bypass == "busy")
    assert way.read(shard, 6 << 20, (6 << 20) + 9, buffer).tobytes() == content[6 << 20 : (6 << 20) + 9]
    assert way.resident(shard, 6 << 20, (6 << 20) + 9) is not None  # what is small is always kept


def test_a_bypass_that_is_refused_after_all(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, way = opened(path, "mmap", False), Access("mmap", False, "always")
    shard.direct = access.os.dup(shard.handle.fd)

    def refuse(*_: object) -> int:
        raise OSError(access.errno.EINVAL, "refused")

    monkeypatch.setattr(access.os, "preadv", refuse)
    assert way.read(shard, 5, 1 << 20, Buffer()).tobytes() == content[5 : 1 << 20]
    assert not way.bypasses
