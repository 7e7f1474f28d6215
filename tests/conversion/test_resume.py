"""A conversion that is killed, interrupted or out of room goes on where it stopped, and ends with the same bytes."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from hsloader import ConversionError, StoreBusyError, convert, open_dataset, verify
from hsloader.conversion.report import Progress
from hsloader.store import shard as shard_module
from hsloader.store.manifest import Manifest, SegmentEntry
from hsloader.store.publish import Root
from tests.conversion.sources import fill, flip_a_byte, leftovers, tree

SEGMENT = 1 << 20
CODE = """
import sys
from hsloader import convert
convert(sys.argv[1], sys.argv[2], segment_size=1 << 20, workers=int(sys.argv[3]))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen samples, one of them damaged: five segments of 1 MiB."""
    src = tmp_path_factory.mktemp("source")
    fill(src, 14)
    flip_a_byte(src / "data_5.pt")
    return src


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a conversion that nothing disturbed."""
    dst = tmp_path_factory.mktemp("undisturbed") / "dst"
    report = convert(source, dst, segment_size=SEGMENT)
    assert report.segments == 5
    assert [q.name for q in report.quarantined] == ["data_5.pt"]
    assert not verify(dst).problems
    return tree(dst)


def test_a_slow_segment_holds_up_how_many_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the first is listed no more than the plan counts on lie on the disk beside their sources."""
    from hsloader.conversion import execute
    from hsloader.conversion.space import most_ahead
    from hsloader.conversion.task import SegmentResult, SegmentTask, convert_segment

    class Pool:
        """One worker that is asked last for what it was given first."""

        def __init__(self, size: int) -> None:
            self.tasks: list[SegmentTask] = []
            self.size = size

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        @property
        def has_room(self) -> bool:
            return len(self.tasks) < self.size

        @property
        def busy(self) -> int:
            return len(self.tasks)

        def submit(self, task: SegmentTask) -> None:
            self.tasks.append(task)

        def messages(self) -> list[tuple[int, SegmentResult]]:
            task = self.tasks.pop()
            return [(task.number, convert_segment(task))]

    waiting: list[int] = []

    def place(root: Root, temporary: Any, number: int) -> SegmentEntry:
        entry = placed(root, temporary, number)
        manifest = root.manifest()
        listed = len(manifest.segments) if manifest is not None else 0
        waiting.append(sum(path.is_dir() for path in (root.path / "segments").iterdir()) - listed)
        return entry

    placed = Root.place
    monkeypatch.setattr(Root, "place", place)
    monkeypatch.setattr(execute, "WorkerPool", Pool)
    src = tmp_path / "src"
    fill(src, 36)
    report = convert(src, tmp_path / "dst", segment_size=SEGMENT, workers=2)
    assert report.segments > 2 * most_ahead(2)
    assert max(waiting) == most_ahead(2) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_moments(source: Path, undisturbed: dict[str, str], tmp_path: Path, workers: int) -> None:
    dst, moments = tmp_path / "dst", random.Random(workers)
    command = [sys.executable, "-c", CODE, str(source), str(dst), str(workers)]
    for _ in range(6):
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            try:
                process.wait(moments.uniform(0.25, 0.9))
            except subprocess.TimeoutExpired:
                process.kill()
        if (dst / "manifest.json").exists():  # whatever the moment, what is listed is whole
            with open_dataset(dst) as dataset:
                for i in range(len(dataset)):
                    dataset.read(i, "hidden_states")
    _when_nobody_writes(dst)
    report = convert(source, dst, segment_size=SEGMENT)
    assert (report.samples_found, len(report.quarantined)) == (14, 1)
    assert tree(dst) == undisturbed
    assert leftovers(dst) == []


def test_interrupted_by_the_keyboard(source: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    code = CODE.replace("workers=int(sys.argv[3])", "workers=2, progress=lambda p: print(p.stage, flush=True)")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(dst)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert any("convert" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
        _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    assert leftovers(dst) == []
    convert(source, dst, segment_size=SEGMENT)
    assert tree(dst) == undisturbed


class FullDisk:
    """Writes that fail with ENOSPC after so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.pwritev

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        self.room -= sum(map(len, buffers))
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(fd, buffers, offset)


@pytest.mark.parametrize("room", [1, 300_000, 1_500_000, 2_200_000])
def test_full_disk(
    source: Path, undisturbed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    dst = tmp_path / "dst"
    with monkeypatch.context() as patched:
        patched.setattr(shard_module.os, "pwritev", FullDisk(room).pwritev)
        with pytest.raises(ConversionError, match=r"No space left.*free.*more are needed.*of 5 segments.*same command"):
            convert(source, dst, segment_size=SEGMENT, workers=1)
    assert leftovers(dst) == []
    report = convert(source, dst, segment_size=SEGMENT)
    assert report.converted + report.present == 13
    assert tree(dst) == undisturbed


def test_a_disk_that_is_full_for_the_manifest(
    source: Path, undisturbed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "dst"
    append = Root.append_segments

    def full(root: Root, entries: Sequence[SegmentEntry], *rest: Any, **named: Any) -> Manifest:
        if entries[0].number == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(root, entries, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Root, "append_segments", full)
        with pytest.raises(ConversionError, match=r"2 of 5 segments of this run are listed \(5 samples\)"):
            convert(source, dst, segment_size=SEGMENT, workers=1)
    convert(source, dst, segment_size=SEGMENT)
    assert tree(dst) == undisturbed


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_segment_that_was_damaged_before_it_was_listed_is_made_again(
    source: Path, undisturbed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    dst = tmp_path / "dst"

    def full(*arguments: Any, **named: Any) -> Manifest:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Root, "append_segments", full)
        with pytest.raises(ConversionError, match="0 of 5 segments"):
            convert(source, dst, segment_size=SEGMENT, workers=1)
    metadata = dst / "segments" / "000000" / "zarr.json"
    if damage == "cut":
        metadata.write_bytes(metadata.read_bytes()[:200])
    else:
        metadata.unlink()
    convert(source, dst, segment_size=SEGMENT)
    assert tree(dst) == undisturbed


def test_not_enough_room_is_told_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsloader.conversion.space.free_bytes", lambda path: 1000)
    with pytest.raises(ConversionError, match=r"not enough room.*are needed, 1\.0 kB are free"):
        convert(source, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_a_killed_worker_is_named(source: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        children = psutil.Process().children()
        if progress.stage == "convert" and children and not killed:
            killed.append(children[0].pid)
            children[0].kill()

    with pytest.raises(ConversionError, match=r"(?s)worker.*SIGKILL.*memory.*same command"):
        # Long enough for the first word of progress to come before the end.
        convert(source, dst, segment_size=SEGMENT, workers=2, progress=kill)
    assert leftovers(dst) == []
    convert(source, dst, segment_size=SEGMENT)
    assert tree(dst) == undisturbed


def test_a_second_converter_is_refused(source: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    refusals = []

    def again(progress: Progress) -> None:
        if progress.stage == "convert" and not refusals:
            with pytest.raises(StoreBusyError, match="another conversion") as refusal:
                convert(source, dst, segment_size=SEGMENT)
            refusals.append(refusal)

    convert(source, dst, segment_size=SEGMENT, workers=1, progress=again)
    assert refusals
    assert tree(dst) == undisturbed


def test_workers_and_threads_change_no_byte(source: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    convert(source, tmp_path / "dst", segment_size=SEGMENT, workers=3, threads=3, read_back=False)
    assert tree(tmp_path / "dst") == undisturbed


def _when_nobody_writes(dst: Path) -> None:
    """Wait until the workers of a killed run have left."""
    end = time.monotonic() + 10
    while any(str(dst) in " ".join(_command(p)) or "conversion.worker" in " ".join(_command(p)) for p in _strays()):
        assert time.monotonic() < end
        time.sleep(0.01)


def _strays() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["ppid"]) if p.info["ppid"] == 1]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
