"""Shard files: what is written can be found again, rolled back, and noticed when damaged."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from hsloader.store.shard import (
    ABSENT,
    ShardError,
    ShardWriter,
    frame_crc,
    index_bytes,
    index_crc,
    read_index,
    shard_digest,
)


def frame(length: int, seed: int = 0) -> memoryview:
    """A frame of ``length`` bytes: noise with its crc32c."""
    body = np.random.default_rng(seed).bytes(length - 4)
    return memoryview(body + crc32c(body).to_bytes(4, "little"))


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def index_of(path: Path, slots: int, **options: Any) -> np.ndarray[Any, Any]:
    with opened(path) as fd:
        return read_index(fd, path.stat().st_size, slots, **options)


STEPS = st.one_of(
    st.tuples(
        st.just("append"),
        st.one_of(st.integers(4, 3000), st.sampled_from([250_000, 300_000, 5_000_000])),
        st.sampled_from([1, 8, 64, 4096, 10_000]),
    ),
    st.tuples(st.just("mark"), st.just(0), st.just(0)),
    st.tuples(st.just("rollback"), st.just(0), st.just(0)),
)


@given(st.lists(STEPS, max_size=25), st.integers(0, 5))
@settings(max_examples=60)
def test_a_shard_holds_what_was_appended_and_not_rolled_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], spare: int
) -> None:
    path = tmp_path_factory.mktemp("shard") / "c.0"
    slots = max(1, sum(step[0] == "append" for step in steps) + spare)
    writer = ShardWriter(path, slots)
    held: list[tuple[memoryview, int]] = []
    mark, kept = writer.mark(), 0
    for number, (step, length, align) in enumerate(steps):
        if step == "append":
            writer.append(frame(length, number), align)
            held.append((frame(length, number), align))
        elif step == "mark":
            mark, kept = writer.mark(), len(held)
        else:
            writer.rollback(mark)
            del held[kept:]
        assert writer.count == len(held)
    record = writer.seal(fsync=False)
    data = path.read_bytes()
    path.unlink()
    rows = np.frombuffer(data[-index_bytes(slots) : -4], "<u8").reshape(slots, 2)
    assert (record.chunks, record.size) == (len(held), len(data))
    assert (rows[len(held) :] == ABSENT).all()
    end = 0
    for (expected, align), (offset, length) in zip(held, rows.tolist(), strict=False):
        assert offset % align == 0
        assert not any(data[end:offset])
        assert data[offset : offset + length] == expected
        end = offset + length
    assert end == len(data) - index_bytes(slots)
    crcs = [crc32c(held_frame[:-4]) for held_frame, _ in held]
    assert record.index_crc == index_crc(rows) == int.from_bytes(data[-4:], "little")
    assert record.digest == shard_digest(rows, crcs)
    assert record.digest == hashlib.sha256(rows.tobytes() + np.array(crcs, "<u4").tobytes()).hexdigest()


def sealed_shard(path: Path, slots: int = 6) -> Path:
    writer = ShardWriter(path, slots)
    for number in range(4):
        writer.append(frame(100 + number, number), 64)
    writer.seal(fsync=True)
    return path


def test_an_index_is_read_back_and_compared_with_the_record(tmp_path: Path) -> None:
    path = sealed_shard(tmp_path / "c.0.0")
    index = index_of(path, 6)
    assert index.shape == (6, 2)
    assert index[:4, 1].tolist() == [100, 101, 102, 103]
    assert np.array_equal(index_of(path, 6, crc=index_crc(index)), index)
    with pytest.raises(ShardError, match="not its shard"):
        index_of(path, 6, crc=index_crc(index) ^ 1)


def test_damage_of_the_index_is_noticed(tmp_path: Path) -> None:
    path = sealed_shard(tmp_path / "c.0")
    whole = path.read_bytes()
    for place in range(1, index_bytes(6) + 1):
        damaged = bytearray(whole)
        damaged[-place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(ShardError, match="crc32c"):
            index_of(path, 6)
    for cut in (1, 4, 16, len(whole) - 3, len(whole)):
        path.write_bytes(whole[: len(whole) - cut])
        with pytest.raises(ShardError):
            index_of(path, 6)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ShardError):
        index_of(path, 6)
    path.write_bytes(whole[:-10])
    with opened(path) as fd, pytest.raises(ShardError, match="ends before"):
        read_index(fd, len(whole), 6)
    for slots in (5, 7, 10_000_000):
        path.write_bytes(whole)
        with pytest.raises(ShardError):
            index_of(path, slots)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(0, 501)], "outside"),
        ([(501, 1)], "outside"),
        ([(500, 1)], "outside"),
        ([(0, 0)], "outside"),
        ([(2**64 - 2, 100)], "outside"),
        ([(100, 2**64 - 50)], "outside"),
        ([(ABSENT, 10)], "outside"),
        ([(10, ABSENT)], "outside"),
        ([(0, 100), (99, 10)], "over each other"),
        ([(200, 50), (0, 201)], "over each other"),
        ([(0, 10), (0, 10)], "over each other"),
    ],
)
def test_hostile_ranges_under_a_right_checksum_are_refused(
    tmp_path: Path, rows: list[tuple[int, int]], words: str
) -> None:
    index = np.array([*rows, (ABSENT, ABSENT)], "<u8")
    path = tmp_path / "c.0"
    path.write_bytes(bytes(500) + index.tobytes() + index_crc(index).to_bytes(4, "little"))
    with pytest.raises(ShardError, match=words):
        index_of(path, len(index))


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=6))
def test_any_index_is_refused_or_lies_inside_the_file(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]]
) -> None:
    index = np.array(rows, "<u8")
    path = tmp_path_factory.mktemp("shard") / "c.0"
    path.write_bytes(bytes(300) + index.tobytes() + index_crc(index).to_bytes(4, "little"))
    try:
        found = index_of(path, len(index)).tolist()
    except ShardError:
        return
    finally:
        path.unlink()
    assert all(offset + length <= 300 or (offset, length) == (ABSENT, ABSENT) for offset, length in found)


def test_the_file_is_created_exclusively_and_aborted_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "c.0"
    writer = ShardWriter(path, 2)
    with pytest.raises(FileExistsError):
        ShardWriter(path, 2)
    writer.append(frame(50))
    writer.abort()
    writer.abort()
    assert not path.exists()
    full = ShardWriter(path, 1)
    full.append(frame(50))
    with pytest.raises(ValueError, match="all 1 chunks"):
        full.append(frame(50))
    full.seal(fsync=False)
    full.abort()
    assert path.exists()


def test_a_mark_from_ahead_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "c.0", 4)
    early = writer.mark()
    writer.append(frame(50))
    late = writer.mark()
    writer.rollback(early)
    with pytest.raises(ValueError, match="ahead"):
        writer.rollback(late)
    writer.abort()


Write = Callable[[int, list[Any], int], int]


def _fails_after(limit: int, real: Write) -> Write:
    """A disk with room up to byte ``limit``, writing at most 100,000 bytes a call."""

    def write(fd: int, pieces: list[Any], position: int) -> int:
        room = limit - position
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, [memoryview(b"".join(pieces))[: min(room, 100_000)]], position)

    return write


def test_a_full_disk_names_the_file_and_can_be_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "c.0", tmp_path / "c.1"
    real = os.pwritev
    writer = ShardWriter(path, 4)
    writer.append(frame(3_000_000, 1), 64)
    mark = writer.mark()
    monkeypatch.setattr(os, "pwritev", _fails_after(4_500_000, real))
    with pytest.raises(OSError, match="No space") as caught:
        writer.append(frame(4_000_000, 2), 64)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert writer.size == mark.end.size == 3_000_000
    assert path.stat().st_size == 4_500_000
    writer.rollback(mark)
    assert path.stat().st_size <= 3_000_000
    monkeypatch.setattr(os, "pwritev", _fails_after(1 << 40, real))
    expected = ShardWriter(other, 4)
    for target in (writer, expected):
        if target is expected:
            target.append(frame(3_000_000, 1), 64)
        target.append(frame(20, 3), 4096)
        target.append(frame(5_000_000, 4), 8)
    assert writer.seal(fsync=False) == expected.seal(fsync=False)
    assert path.read_bytes() == other.read_bytes()


def test_what_a_failed_append_left_does_not_reach_the_sealed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path / "c.0", 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", _fails_after(3_500_000, os.pwritev))
        with pytest.raises(OSError, match="No space"):
            writer.append(frame(6_000_000))
    record = writer.seal(fsync=False)
    assert (tmp_path / "c.0").stat().st_size == record.size == index_bytes(1)


def test_a_shard_that_cannot_be_sealed_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = ShardWriter(tmp_path / "c.0", 1)
    writer.append(frame(100))
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"c\.0") as caught:
        writer.seal()
    assert caught.value.errno == errno.EIO
    writer.abort()
    assert not (tmp_path / "c.0").exists()


def test_a_seal_that_failed_for_lack_of_space_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, expected = ShardWriter(tmp_path / "c.0", 3), ShardWriter(tmp_path / "c.1", 3)
    for target in (writer, expected):
        target.append(frame(5_000, 1), 64)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", _fails_after(5_020, os.pwritev))
        with pytest.raises(OSError, match="No space"):
            writer.seal()
    assert writer.seal() == expected.seal()
    assert (tmp_path / "c.0").read_bytes() == (tmp_path / "c.1").read_bytes()


def test_after_a_failed_fsync_no_second_one_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = ShardWriter(tmp_path / "c.0", 1)
    writer.append(frame(100))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="Input/output"):
            writer.seal()
    with pytest.raises(OSError, match="Input/output") as caught:
        writer.seal()
    assert caught.value.filename == str(tmp_path / "c.0")
    writer.abort()


def test_the_crc_of_a_frame_is_its_last_four_bytes() -> None:
    assert frame_crc(frame(100)) == crc32c(frame(100)[:-4])
    assert frame_crc(np.frombuffer(frame(100), np.uint8)) == frame_crc(frame(100))
