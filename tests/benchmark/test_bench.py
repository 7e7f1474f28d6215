"""hsloader bench on small data: what it finds, what it says, and that nothing is left behind, also when interrupted."""

from __future__ import annotations

import ast
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hsloader
from hsloader.benchmark import api, disk, residency
from hsloader.benchmark.page import render_page
from hsloader.benchmark.results import BenchReport
from hsloader.benchmark.samples import copy_files
from hsloader.benchmark.scratch import ScratchFile, ScratchFolder, scratch_place
from hsloader.benchmark.stock import measure_stock
from hsloader.benchmark.timing import Deadline, run_threads
from tests.benchmark.test_verdict import measured, need
from tests.reader.making import make_dataset

SMALL: dict[str, Any] = {"seconds": 1.0, "scratch_bytes": 16 << 20, "threads": 2}


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def dataset_path(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "data.hs", samples=12, longest=60).close()
    return tmp_path / "data.hs"


def test_a_dataset_is_measured_and_left_as_it_was(dataset_path: Path) -> None:
    before = listing(dataset_path.parent)
    steps: list[str] = []
    report = hsloader.bench(
        dataset_path, step_ms=100, tokens_per_step=256, progress=lambda state: steps.append(state.part), **SMALL
    )
    assert listing(dataset_path.parent) == before
    assert {m.part for m in report.measurements} >= {"disk", "decode", "pipeline"}
    assert all(m.rate > 0 and m.limit > 0 for m in report.measurements)
    assert {"disk", "decode", "pipeline"} <= set(steps)
    assert report.need is not None
    assert report.need.a_gpu == 2560 * report.bytes_a_token
    assert "bound by" in report.verdict.sentence
    document = json.loads(json.dumps(report.to_dict()))
    assert document["read_options"] == json.loads(report.options_json())
    assert eval(report.options_python(), {"hsloader": hsloader}) == hsloader.ReadOptions(**document["read_options"])


def test_pages_of_a_dataset_are_dropped_only_when_asked(dataset_path: Path) -> None:
    kept = [m.state for m in hsloader.bench(dataset_path, **SMALL).of("pipeline")]
    assert "cold" not in kept
    dropped = [m.state for m in hsloader.bench(dataset_path, drop_cache=True, **SMALL).of("pipeline")]
    if _on_disk(dataset_path):
        assert dropped[0] != "warm"  # reading a shard's index brings pages of so small a file back


def _on_disk(path: Path) -> bool:
    from hsloader.reader.modes import file_system

    return file_system(path)[0] not in ("tmpfs", "ramfs", "overlay")


def test_what_cannot_be_told_of_the_page_cache_is_said(dataset_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsloader.benchmark.pipeline.is_told", lambda fd: False)  # as of another user's dataset
    monkeypatch.setattr(api, "is_told", lambda fd: False)
    report = hsloader.bench(dataset_path, **SMALL)
    assert {m.state for m in report.of("pipeline")} == {"mixed"}
    assert any("belongs to another user" in note for note in report.notes)


def test_an_empty_folder_stays_empty(tmp_path: Path) -> None:
    report = hsloader.bench(tmp_path, hidden_size=256, tokens_per_second=1000, **SMALL)
    assert listing(tmp_path) == []
    assert report.bytes_a_token == 4 * 256 * 2 + 5
    assert 1.2 < report.ratio < 1.7
    assert any("synthetic" in note for note in report.notes)


def test_sample_files_are_loaded_the_stock_way_and_converted(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from hsloader.cli.demo_data import DemoShape, write_samples

    dump = tmp_path / "dump"
    dump.mkdir()
    write_samples(dump, DemoShape(samples=3, mean_length=40, hidden_size=256, decoder_layers=8))
    before = {name: (dump / name).stat().st_mtime_ns for name in listing(dump)}
    report = hsloader.bench(dump, **SMALL)
    assert {name: (dump / name).stat().st_mtime_ns for name in listing(dump)} == before
    assert listing(tmp_path) == sorted(["dump", *(f"dump/{name}" for name in before)])
    assert report.of("stock"), report.notes
    assert report.of("pipeline")
    assert report.bytes_a_token == 4 * 256 * 2 + 5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"step_ms": 10}, "step_ms needs tokens_per_step"),
        ({"step_ms": 10, "tokens_per_second": 1}, "give one of them"),
        ({"tokens_per_second": -1}, "tokens_per_second=-1: expected a number above 0"),
        ({"tokens_per_second": float("nan")}, "tokens_per_second=nan: expected"),
        ({"step_ms": 0, "tokens_per_step": 8}, "step_ms=0: expected a number above 0"),
        ({"step_ms": 1, "tokens_per_step": 0}, "tokens_per_step=0: expected at least 1"),
        ({"seconds": float("inf")}, "seconds=inf: expected"),
        ({"gpus": 0}, "gpus=0: expected at least 1"),
        ({"scratch_bytes": 1}, "scratch_bytes=1: expected at least 16,777,216"),
        ({"threads": 257}, "threads=257: expected 1 to 256"),
        ({"hidden_size": 0}, "hidden_size=0: expected at least 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hsloader.bench(tmp_path, **wrong)


def test_no_more_threads_are_asked_for_than_options_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []

    class Stop(Exception):
        pass

    def run(*arguments: Any, threads: int, **more: Any) -> None:
        chosen.append(hsloader.ReadOptions(threads=threads).threads or 0)
        raise Stop

    monkeypatch.setattr(api, "cpu_share", lambda ranks: 768)
    monkeypatch.setattr(api, "_Run", run)
    with pytest.raises(Stop):
        hsloader.bench(tmp_path)
    assert chosen == [256]


def test_a_gpu_that_another_process_fills_costs_one_note(dataset_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 64 MiB\nand much more")

    monkeypatch.setattr(api, "gpu_problem", lambda: "")
    monkeypatch.setattr(api, "measure_transfer", full)
    report = hsloader.bench(dataset_path, **SMALL)
    assert report.of("pipeline")
    assert report.notes[-1] == (
        "copies to the GPU were not measured to the end: CUDA out of memory. Tried to allocate 64 MiB"
    )


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_that_ends_while_the_scratch_is_filled_costs_one_note(
    dataset_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The file system says that there is room: it does not count for this user."""
    fill = ScratchFile.fill
    opened: list[ScratchFile] = []

    def full(self: ScratchFile, *arguments: Any) -> None:
        opened.append(self)
        fill(self, 1 << 20, *arguments[1:])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(ScratchFile, "fill", full)
    monkeypatch.setattr(api, "data_files", lambda *arguments, **more: None)  # all of the dataset is in memory
    report = hsloader.bench(dataset_path, **SMALL)
    assert not report.of("disk")
    assert report.of("pipeline")
    assert opened[0].fd == -1
    (note,) = [note for note in report.notes if "the disk was not measured alone" in note]
    assert f"{os.strerror(number)} (give a smaller scratch_bytes)" in note


def test_other_errors_of_the_scratch_file_are_raised(dataset_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ScratchFile, *arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ScratchFile, "fill", broken)
    monkeypatch.setattr(api, "data_files", lambda *arguments, **more: None)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        hsloader.bench(dataset_path, **SMALL)


def test_a_quota_that_ends_while_samples_are_written_costs_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(api, "synthetic_dataset", full)
    report = hsloader.bench(tmp_path, **SMALL)
    assert report.of("disk")
    assert not report.of("decode")
    (note,) = [note for note in report.notes if "decoding was not measured" in note]
    assert os.strerror(errno.EDQUOT) in note
    assert listing(tmp_path) == []


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        hsloader.bench(tmp_path / "nowhere")


def command(path: Path, *more: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "hsloader", "bench", str(path), "--scratch", "64MiB", "--hidden-size", "512", *more]
    here = str(Path(hsloader.__file__).parents[1])
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": here}
    )


def wait_for(folder: Path, running: subprocess.Popen[str]) -> None:
    """Until there is something in ``folder``."""
    until = time.monotonic() + 60
    while not listing(folder):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_cleans_up(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with command(tmp_path, "--seconds", "60") as running:
        wait_for(tmp_path, running)
        running.send_signal(number)
        running.communicate(timeout=60)
    assert running.returncode == status
    assert listing(tmp_path) == []


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with command(tmp_path, "--seconds", "60") as running:
        wait_for(tmp_path, running)
        running.kill()
        running.communicate(timeout=60)
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".hsloader-bench-")]
    assert left
    until = time.monotonic() + 30
    for folder in left:
        os.utime(folder, (0, 0))
    while list(tmp_path.iterdir()) and time.monotonic() < until:
        with ScratchFolder(tmp_path):
            pass
        time.sleep(0.1)  # the killed process's lock goes with its last thread
    assert list(tmp_path.iterdir()) == []


def test_a_running_benchmark_keeps_its_scratch(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as first:
        os.utime(first.path, (0, 0))
        with ScratchFolder(tmp_path) as second:
            assert first.path.is_dir()
            assert second.path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_scratch_that_was_half_removed_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".hsloader-bench-x"  # its owner file went first
    (left / "files").mkdir(parents=True)
    os.utime(left, (0, 0))
    with ScratchFolder(tmp_path):
        assert not left.exists()


def test_scratch_stays_on_the_disk_in_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "dump"
    inner.mkdir()
    assert scratch_place(inner, beside=True) == tmp_path.resolve()
    assert scratch_place(inner, beside=False) == inner.resolve()
    monkeypatch.setattr("hsloader.benchmark.scratch.writable", lambda folder: folder != inner.resolve())
    assert scratch_place(inner, beside=False) == tmp_path.resolve()
    if os.path.ismount("/dev/shm"):  # the folder around it is another file system
        assert scratch_place(Path("/dev/shm"), beside=True) == Path("/dev/shm")
        monkeypatch.setattr("hsloader.benchmark.scratch.writable", lambda folder: folder == Path("/dev"))
        assert scratch_place(Path("/dev/shm"), beside=False) is None


def test_files_that_the_scratch_does_not_hold_are_not_copied(tmp_path: Path) -> None:
    files = []
    for number, size in enumerate((9000, 1500, 600, 600)):
        files.append(tmp_path / f"data_{number}.pt")
        files[-1].write_bytes(bytes(size))
    (tmp_path / "copies").mkdir()
    copied = copy_files(files, tmp_path / "copies", 1000, Deadline(60.0))
    assert [file.name for file in copied] == ["data_1.pt"]
    assert copy_files(files[:1], tmp_path / "copies", 1000, Deadline(60.0)) == []


@pytest.mark.torch
def test_thousands_of_files_in_the_old_format_are_loaded_the_stock_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("hsloader.benchmark.stock._SETTINGS", ((0, True), (0, False)))
    old = tmp_path / "data_0.pt"  # mmap=True is refused for it
    torch.save({"x": torch.zeros(100)}, old, _use_new_zipfile_serialization=False)
    many = [old] * ((1 << 17) // len(str(old)) + 1)  # too many for a command line
    found = measure_stock(many, 0.5, may_drop=False)
    assert {m.settings["mmap"] for m in found} == {False}
    assert all(m.rate > 0 for m in found)
    old.write_bytes(b"no tensors at all")
    with pytest.raises(OSError, match="UnpicklingError: "):
        measure_stock([old], 0.5, may_drop=False)


def test_threads_that_cannot_start_are_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def few(self: threading.Thread) -> None:
        if self.name == "hsloader-bench-2":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", few)
    with pytest.raises(RuntimeError, match="can't start"):
        run_threads(lambda thread: 1, 4, 0.1)


@pytest.mark.parametrize("counted", [True, False])
def test_reads_are_from_memory_only_where_the_kernel_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    monkeypatch.setattr(disk, "read_from_disk", lambda: 0)  # as it stays on FUSE, whatever is fetched
    monkeypatch.setattr(disk, "resident_share", lambda *place: 0.0)
    monkeypatch.setattr(disk, "file_system", lambda path: ("ext4", True) if counted else ("fuse", False))
    with ScratchFile(tmp_path) as scratch:
        scratch.fill(1 << 20, 60.0, lambda size: None)
        data = disk.RawData.of(scratch)
        plan = disk.DiskPlan("sequential", 1 << 18, 1, "buffered", "cold")
        (found,) = disk.measure_disk(data, [plan], Deadline(5.0), most=1 << 20)
    assert found.from_memory is counted


def test_what_the_page_cache_holds_is_told_to_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    with (tmp_path / "file").open("rb") as file:
        assert residency.is_told(file.fileno())
        assert residency.resident_share(file.fileno()) == 1.0
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert not residency.is_told(file.fileno())

        def refuse(*arguments: Any, **more: Any) -> None:
            raise OSError(19, "No such device")

        monkeypatch.setattr(residency.mmap, "mmap", refuse)  # as of a FUSE mount with direct_io
        assert residency.resident_share(file.fileno()) == 0.0


def test_a_scratch_file_has_no_name(tmp_path: Path) -> None:
    with ScratchFile(tmp_path) as scratch:
        scratch.fill(1 << 20, 60.0, lambda size: None)
        assert list(tmp_path.iterdir()) == []
        data = np.frombuffer(os.pread(scratch.fd, 1 << 20, 0), np.uint8)
        assert len(np.unique(data)) == 256


def test_the_command_prints_a_verdict_and_a_document(dataset_path: Path) -> None:
    with command(dataset_path, "--seconds", "1", "--tokens-per-second", "1000", "--threads", "1") as running:
        text, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    assert "bound by" in text
    assert "hsloader.ReadOptions(" in text
    with command(dataset_path, "--seconds", "1", "--json", "--threads", "1") as running:
        text, errors = running.communicate(timeout=120)
    assert json.loads(text)["verdict"]["bound"]
    assert errors == ""


def made_up() -> BenchReport:
    from hsloader.benchmark.verdict import judge, rates_of, with_limits

    lines = [
        measured("disk", 1.0, "cold", pattern="random", block=4 << 20, depth=4, way="buffered"),
        measured("disk", 1.2, "cold", pattern="random", block=4 << 20, depth=4, way="O_DIRECT", from_memory=True),
        measured("decode", 2.0, threads=1),
        measured("decode", 3.5, threads=2),
        measured("pipeline", 1.4, "cold", mode="mmap", threads=2),
        measured("pipeline", 3.0, "warm", mode="mmap", threads=2),
        measured("transfer", 50.0, memory="pinned"),
        measured("stock", 0.3, "cold", workers=4),
    ]
    found = rates_of(lines, 1.48, in_memory=False)
    return BenchReport(
        path="/data/<set> & co",
        subject="a dataset",
        machine={"processor": "test", "cores": 2, "memory": 1 << 34, "file_system": "ext4", "kernel": "6"},
        bytes_a_token=57_344,
        ratio=1.48,
        measurements=with_limits(lines, found),
        need=need(1.0),
        verdict=judge(found, need(1.0), hsloader.ReadOptions(threads=2, mode="pread")),
        notes=["a note with <b>"],
        seconds=30.0,
    )


@pytest.fixture(scope="module")
def matplotlib_fonts() -> None:
    """matplotlib keeps the fonts it has used open for the life of the process: before the tests look for leftovers."""
    pytest.importorskip("matplotlib")
    render_page(made_up())


@pytest.mark.usefixtures("matplotlib_fonts")
def test_the_page_is_one_file_with_its_plots(tmp_path: Path) -> None:
    report = made_up()
    report.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text == render_page(report)
    assert text.count("data:image/svg+xml;base64,") == 4
    assert "/data/&lt;set&gt; &amp; co" in text
    assert "a note with &lt;b&gt;" in text
    for foreign in ("<script", "http://", "https://", "<link"):
        assert foreign not in text
    assert ast.literal_eval(repr(report.to_dict())) == report.to_dict()


def test_without_matplotlib_the_page_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'hsloader\[report\]'"):
        made_up().save(tmp_path / "page.html")
