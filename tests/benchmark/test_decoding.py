"""Decoding is measured as the reader does it: threads shared among processes, which are gone afterwards."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hsloader.benchmark import decoding
from hsloader.benchmark.decoding import Frames, frames_of, measure_decoding
from hsloader.benchmark.timing import Deadline
from hsloader.store.codec import FrameError
from tests.reader.making import make_dataset


@pytest.fixture
def frames(tmp_path: Path) -> Frames:
    with make_dataset(tmp_path / "data.hs", samples=12) as dataset:
        found = frames_of(dataset, 1 << 30)
    assert found is not None
    return found


def children() -> list[str]:
    out = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False)
    return [line for line in out.stdout.splitlines() if "decoding_child" in line]


def test_one_line_for_each_number_of_threads(frames: Frames) -> None:
    found = measure_decoding(frames, [1, 2, 5], Deadline(20.0), seconds=0.1)
    assert [(m.name, m.settings["threads"]) for m in found] == [("1 thread", 1), ("2 threads", 2), ("5 threads", 5)]
    for line in found:
        assert line.size > 0
        assert line.size % frames.codec.chunk_bytes == 0
        assert line.rate == pytest.approx(line.size / line.seconds)
        assert line.cpu_seconds_a_gb is not None
        assert line.cpu_seconds_a_gb > 0
    assert not children()


def test_without_processes_threads_of_this_one_are_measured(frames: Frames, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(decoding, "launch", refused)
    (found,) = measure_decoding(frames, [4], Deadline(5.0), seconds=0.1)
    assert found.settings["threads"] == 4
    assert found.size > 0


def test_as_many_processes_as_a_reader_with_that_ring(frames: Frames, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = decoding._Crew.run, []

    def watched(self: decoding._Crew, threads: int, processes: int, seconds: float) -> object:
        seen.append((threads, processes, len(self._children)))
        return run(self, threads, processes, seconds)

    monkeypatch.setattr(decoding._Crew, "run", watched)
    measure_decoding(frames, [1, 2, 8], Deadline(20.0), seconds=0.05)
    measure_decoding(frames, [8], Deadline(20.0), seconds=0.05, slots=4)
    assert seen == [(2, 2, 4), (8, 4, 4), (8, 2, 2)]


def test_a_process_that_is_killed_is_told_and_takes_the_others_along(
    frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = decoding._Crew.run

    def killed(self: decoding._Crew, *arguments: float) -> object:
        os.kill(self._children[0].pid, signal.SIGKILL)
        return run(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(decoding._Crew, "run", killed)
    with pytest.raises(OSError, match=r"^the decoding process \(process \d+\) was killed by signal 9 \(SIGKILL\)"):
        measure_decoding(frames, [4], Deadline(5.0), seconds=0.1)
    until = time.monotonic() + 5
    while children():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_damaged_frame_is_told(frames: Frames, threads: int) -> None:
    broken = Frames(frames.codec, [frame[:-1] for frame in frames.frames])
    with pytest.raises(FrameError, match="crc32c"):
        measure_decoding(broken, [threads], Deadline(5.0), seconds=0.1)
