"""The ring's header: records, areas, infos, and what attaching refuses."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from hsloader.reader.batch import BadSample, decode_bad, encode_bad
from hsloader.reader.counters import FeederCounter, Stage, ThreadCounter, TrainerCounter
from hsloader.reader.report import file_in_hand
from hsloader.reader.ring import Ring, RingShape, Status
from hsloader.store.dataset import Dataset
from tests.reader.making import make_client, request_of

SHAPE = RingShape(slots=3, slot_bytes=8192, area_bytes=4096, threads=2)


def attached(ring: Ring, writable: bool = True) -> Ring:
    """The same ring as another process sees it."""
    flags = os.O_RDWR if writable else os.O_RDONLY
    return Ring.attach(os.open(f"/proc/self/fd/{ring.fd}", flags), writable=writable)


def test_both_sides_see_the_same() -> None:
    ring = Ring.create(SHAPE)
    other = attached(ring)
    assert other.shape == SHAPE
    assert ring.request(1) is None
    ring.write_request(1, 7, -3, 2, b"pieces")
    request = other.request(1)
    assert request is not None
    assert (request.serial, request.key, request.generation) == (7, -3, 2)
    assert other.request_blob(request) == b"pieces"
    assert other.request(0) is None
    other.write_completion(1, request, Status.FILLED, bad=2, blob=b"bad ones", times=(5, 9), decoded=100)
    completion = ring.completion(1)
    assert completion is not None
    assert (completion.serial, completion.status, completion.bad, completion.decoded_bytes) == (7, 1, 2, 100)
    assert ring.completion_blob(request, completion) == b"bad ones"
    other.slot(2)[:] = 5
    assert (ring.slot(2) == 5).all()
    assert not ring.slot(1).any()
    ring.close()
    ring.close()


def test_a_record_in_the_making_is_none() -> None:
    ring = Ring.create(SHAPE)
    ring.write_request(0, 7, 1, 1, b"x")
    at = SHAPE.requests_at
    whole = os.pread(ring.fd, 64, at)
    for cut in range(1, 40, 3):  # a later record of which only the first bytes are there yet
        os.pwrite(ring.fd, bytes(b ^ 0x5A for b in whole[:cut]), at)
        assert ring.request(0) is None
        os.pwrite(ring.fd, whole, at)
    request = ring.request(0)
    assert request is not None
    os.pwrite(ring.fd, b"y", request.area_offset)
    assert ring.request_blob(request) is None


def test_an_area_grows_and_stays_grown() -> None:
    ring = Ring.create(SHAPE)
    big = os.urandom(50_000)
    for slot, serial, blob in ((0, 1, b"a"), (0, 2, big), (1, 3, big[:9000]), (0, 4, big[:20_000]), (1, 5, b"b")):
        ring.write_request(slot, serial, 0, 1, blob)
        request = ring.request(slot)
        assert request is not None
        assert ring.request_blob(request) == blob
    size = os.fstat(ring.fd).st_size
    for serial in range(10, 40):
        ring.write_request(0, serial, 0, 1, big)
        ring.write_request(1, serial + 100, 0, 1, big[:9000])
    assert os.fstat(ring.fd).st_size == size


def test_attach_refuses_what_is_no_ring() -> None:
    ring = Ring.create(SHAPE)

    def file(data: bytes) -> int:
        fd = os.memfd_create("other")
        os.write(fd, data)
        return fd

    header = os.pread(ring.fd, 64, 0)
    for data, words in (
        (b"", "holds 0 bytes"),
        (b"\0" * 4096, "no ring: it begins with"),
        (header[:8] + b"\x63" + header[9:], "version 99"),
        (header, "contradicts itself"),
    ):
        fd = file(data)
        with pytest.raises(ValueError, match=words):
            Ring.attach(fd)
        os.close(fd)


def test_a_monitor_reads_only() -> None:
    ring = Ring.create(SHAPE)
    ring.write_info({"dataset": "/data.hs", "rank": 3})
    ring.write_info({"x": "y" * 9000}, feeder=True)
    ring.trainer[TrainerCounter.TOKENS] = 5
    ring.threads[1, ThreadCounter.TID] = 77
    ring.threads[1, ThreadCounter.STAGE] = Stage.READ
    ring.threads[1, ThreadCounter.OFFSET : ThreadCounter.LENGTH + 1] = (8192, 100)
    ring.threads[:, ThreadCounter.READ_BYTES] = (10, 20)
    ring.write_path(1, b"segments/000000/" + b"x" * 300 + b"/c.0.0")
    ring.write_path(0, b"longer")
    ring.write_path(0, b"short")
    other = attached(ring, writable=False)
    assert other.info() == {"dataset": "/data.hs", "rank": 3}
    assert "left out" in other.info(feeder=True)["error"]
    assert other.trainer[TrainerCounter.TOKENS] == 5
    assert other.threads[:, ThreadCounter.READ_BYTES].sum() == 30
    assert other.path(0) == "short"
    assert len(other.path(1)) == 255
    assert other.path(1).endswith("/c.0.0")
    assert file_in_hand(other).endswith("/c.0.0 at byte 8,192 in /data.hs")
    with pytest.raises(ValueError, match="read-only"):
        other.trainer[0] = 1


def test_rings_are_found_through_proc(usual: Dataset) -> None:
    with make_client(usual) as client:
        client.submit(0, request_of([(2, 0, 0, 3, 0)], 4))
        client.wait(0, 20)
        found = []
        for pid in (os.getpid(), client.pid):
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                if os.path.lexists(path) and os.readlink(path).startswith("/memfd:hsloader-ring"):
                    ring = Ring.attach(os.open(path, os.O_RDONLY), writable=False)
                    found.append(ring.feeder[FeederCounter.PID])
                    assert ring.info()["owner"] == os.getpid()
                    tids = {int(row[ThreadCounter.TID]) for row in ring.threads}
                    pids = {int(row[ThreadCounter.PROCESS]) for row in ring.threads}
                    assert tids <= {int(tid) for pid in pids for tid in os.listdir(f"/proc/{pid}/task")}
        assert set(found) == {client.pid}
        assert len(found) >= 2


def test_a_shape_that_cannot_be() -> None:
    for wrong in ({"slots": 0}, {"slot_bytes": 100}, {"area_bytes": 5}):
        with pytest.raises(ValueError, match="shape"):
            RingShape(**{"slots": 1, "slot_bytes": 4096, "area_bytes": 64, "threads": 1, **wrong})
    assert RingShape.round_slot(1) == 4096
    assert RingShape.round_slot((64 << 20) + 1) == 66 << 20


def test_bad_samples_fit_whatever_the_room() -> None:
    bad = {
        (sample, field): ("os", f"/data/segments/{sample}", 5, 4096 * sample, f"text {sample} " + "x" * 300)
        for sample in range(100)
        for field in (0, 1)
    }
    for room in (1 << 20, 20_000, 8_000):
        blob = encode_bad(bad, room)
        assert len(blob) <= room
        found = decode_bad(blob, ["a", "b"])
        assert [(entry.sample, entry.field) for entry in found] == [(s, "ab"[f]) for s, f in sorted(bad)]
        assert all(entry.text and entry.kind == "os" for entry in found)
    whole = decode_bad(encode_bad(bad, 1 << 20), ["a", "b"])
    assert whole[3] == BadSample(1, "b", "os", "/data/segments/1", 5, 4096, f"text 1 {'x' * 300}")
    assert json.loads(encode_bad(bad, 1))["texts"] == []


def test_counters_do_not_overlap() -> None:
    for kind, room in ((TrainerCounter, 64), (FeederCounter, 64), (ThreadCounter, 32)):
        places = [int(counter) for counter in kind]  # type: ignore[var-annotated,attr-defined]
        assert len(set(places)) == len(places) == len(kind.__members__)  # type: ignore[attr-defined]
        assert max(places) < room
    assert np.dtype(np.int64).itemsize * 32 == 256
