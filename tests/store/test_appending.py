"""Files that grow at their end: right bytes past the page cache and through it, cut back, and after errors."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsloader.store.appending import AppendedFile, End

NOISE = np.random.default_rng(0).bytes(5_000_000)


def piece(length: int, start: int = 0) -> memoryview:
    return memoryview(NOISE)[start : start + length]


def knows_direct(folder: Path) -> bool:
    """Whether the file system of ``folder`` lies on a block device and takes O_DIRECT."""
    if not os.major(folder.stat().st_dev):
        return False
    try:
        os.close(os.open(folder / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


LENGTHS = st.one_of(st.integers(0, 9000), st.sampled_from([4096, 65_536, 1_000_000, 1 << 20, 3_500_000]))


@given(st.lists(st.tuples(st.sampled_from(["append", "append", "end", "cut"]), LENGTHS), max_size=20))
@settings(max_examples=60)
def test_a_file_holds_what_was_appended_and_not_cut(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("appended") / "f"
    file = AppendedFile(os.fspath(path))
    expected, end = bytearray(), file.end()
    for step, length in steps:
        if step == "append":
            file.append([piece(length), piece(length // 3, 7)])
            expected += NOISE[:length] + NOISE[7 : 7 + length // 3]
        elif step == "end":
            end = file.end()
        elif end.size <= len(expected):
            file.cut(end)
            del expected[end.size :]
        assert file.size == len(expected)
    file.complete()
    file.complete()
    file.close()
    assert path.read_bytes() == expected
    path.unlink()


def test_whole_buffers_are_written_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwritev, list[tuple[bool, int]]()

    def write(fd: int, pieces: list[Any], position: int) -> int:
        done = real(fd, pieces, position)
        calls.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), done))
        return done

    monkeypatch.setattr(os, "pwritev", write)
    file = AppendedFile(os.fspath(tmp_path / "f"))
    file.append([piece(5_000_000)])
    file.complete()
    file.close()
    direct = sum(done for past, done in calls if past)
    assert direct == (5_000_000 // 4096 * 4096 if knows_direct(tmp_path) else 0)
    assert sum(done for _, done in calls) == 5_000_000
    assert (tmp_path / "f").read_bytes() == NOISE


def test_a_file_system_without_o_direct_is_written_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, command: int, flags: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    file = AppendedFile(os.fspath(tmp_path / "f"))
    file.append([piece(3_000_001)])
    file.complete()
    file.close()
    assert (tmp_path / "f").read_bytes() == NOISE[:3_000_001]


def _short(real: Callable[..., int]) -> Callable[..., int]:
    """Writes end within a page, from where O_DIRECT cannot go on."""
    return lambda fd, pieces, position: real(fd, [memoryview(pieces[0])[:700_001]], position)


def _refused(real: Callable[..., int]) -> Callable[..., int]:
    """A file system that takes the flag and then refuses such writes."""

    def write(fd: int, pieces: list[Any], position: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, pieces, position)

    return write


@pytest.mark.parametrize("disk", [_short, _refused])
def test_what_o_direct_cannot_write_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Callable[[Callable[..., int]], Callable[..., int]]
) -> None:
    monkeypatch.setattr(os, "pwritev", disk(os.pwritev))
    file = AppendedFile(os.fspath(tmp_path / "f"))
    file.append([piece(3_000_001)])
    file.complete()
    file.close()
    assert (tmp_path / "f").read_bytes() == NOISE[:3_000_001]


def test_a_failed_append_leaves_the_end_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendedFile(os.fspath(tmp_path / "f"))
    file.append([piece(1_500_000)])
    end = file.end()
    real, calls = os.pwritev, list[int]()

    def second_fails(fd: int, pieces: list[Any], position: int) -> int:
        calls.append(position)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, pieces, position)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", second_fails)
        with pytest.raises(OSError, match="No space"):
            file.append([piece(4_000_000, 9)])
    assert len(calls) == 2
    assert file.end() == end == End(1_500_000, NOISE[1_499_136:1_500_000])
    file.append([piece(10, 1_500_000)])
    file.complete()
    file.close()
    file.close()
    assert (tmp_path / "f").read_bytes() == NOISE[:1_500_010]
