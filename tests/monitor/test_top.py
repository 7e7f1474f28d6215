"""top, the metrics endpoint, and doctor on a process that reads through hsloader."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hsloader.monitor.counters import TrainerCounter
from hsloader.monitor.examine import examine
from hsloader.monitor.gpu import GpuReader
from hsloader.monitor.header import RingShape, Snapshot, take_snapshot
from hsloader.monitor.neighbours import FoundRing
from hsloader.monitor.overview import overview
from hsloader.monitor.prometheus import MetricsServer, exposition
from hsloader.monitor.roles import Role
from hsloader.monitor.samples import GpuSample
from hsloader.monitor.situation import Kind
from hsloader.reader.ring import Ring, Status
from tests.monitor.making import snapshot
from tests.monitor.running import script
from tests.reader.making import make_dataset

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def _trainer(folder: Path, *, pause: str, port: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A process that takes batches through a feeder and then does ``pause``."""
    make_dataset(folder / "data.hs", samples=20).close()
    body = f"""
    sys.path[:] = {[str(ROOT), *sys.path]!r}
    from hsloader.reader.client import FeederClient
    from hsloader.store.dataset import open_dataset
    from tests.reader.making import request_of
    with open_dataset("data.hs") as dataset:
        info = {{"rank": 3, "world": 8, "job": "mine"}}
        sizes = {{"slot_bytes": 4096, "budget": 16384}}
        with FeederClient(dataset, ["input_ids"], **sizes, info=info, metrics_port={port}) as client:
            for key in range(10**9):
                client.submit(key, request_of([(0, key % 20, 0, 5, 0)], 1))
                if key >= 2:
                    client.wait(key - 2)
                    client.done(key - 2)
                if key == 9: ready()
                if key >= 9: {pause}
    """
    with script(folder, body) as process:
        yield process


def _hsloader(*arguments: str) -> str:
    command = [sys.executable, "-m", "hsloader", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def test_top_lists_the_loaders_of_this_machine(tmp_path: Path) -> None:
    with _trainer(tmp_path, pause="time.sleep(0.01)") as process:
        rows: list[dict[str, Any]] = json.loads(_hsloader("top", "--json", "--interval", "0.5"))
        (row,) = [row for row in rows if row["pid"] == process.pid]
        text = _hsloader("top", "--once", "--interval", "0.2")
    assert row["dataset"] == str(tmp_path / "data.hs")
    assert (row["rank"], row["world"], row["job"]) == (3, 8, "mine")
    assert row["slots"] == 4
    assert "of data" in row["reason"]  # all of it: the opening line has the first words
    assert row["read_bytes_per_second"] >= 0
    assert row["limit"] in ("trainer-bound", "latency-bound", "disk-bound", "decode-bound")
    assert re.search(rf"^ +{process.pid} +3/8 +data\.hs ", text, re.MULTILINE)
    assert f"pid {process.pid}: " in text


def test_doctor_reads_the_counters_of_a_loader(tmp_path: Path) -> None:
    with _trainer(tmp_path, pause="time.sleep(0.05)") as process:
        found = examine(process.pid, 1.0, python=False)
        assert found.verdict.kind is Kind.TRAINER
        assert f"hsloader reads {tmp_path / 'data.hs'}; trainer-bound: " in found.verdict.sentence
        feeder = next(p for p in found.processes if p.role is Role.FEEDER)
        os.kill(feeder.pid, signal.SIGSTOP)
        stopped = examine(process.pid, 0.5, python=False)
        os.kill(feeder.pid, signal.SIGCONT)
    assert stopped.verdict.kind is Kind.STOPPED
    assert f"kill -CONT {feeder.pid}" in stopped.verdict.advice


def test_metrics_are_served_by_the_feeder(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with _trainer(tmp_path, pause="time.sleep(0.01)", port=port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/secrets", timeout=10)
    assert re.search(r'^hsloader_ring_slots\{rank="3",job="mine",.*\} 4$', text, re.MULTILINE)


def test_a_scrape_that_fails_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def gone() -> Snapshot:
        raise ValueError("the ring is gone")

    server = MetricsServer(0, gone)
    try:
        with pytest.raises(OSError, match="closed connection"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10)
    finally:
        server.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("device", "processes", "busy"),
    [
        ("cuda:1", (), 0.9),
        ("cuda:0", (77,), 0.9),  # NVML knows better
        ("cuda", (), None),  # whichever is current there
        ("cpu", (), None),
    ],
)
def test_the_gpu_beside_a_loader_is_its_own(device: str, processes: tuple[int, ...], busy: float | None) -> None:
    gpus = [GpuSample(0, "a", 0.1, 1, 2), GpuSample(1, "b", 0.9, 1, 2, processes)]
    before, after = (FoundRing((1, 2), "", 77, snapshot(at, info={"device": device})) for at in (0, 1))
    assert [row.gpu for row in overview([before], [after], gpus)] == [busy]
    assert [row.gpu for row in overview([before], [after], gpus[:1])] == [0.1 if device in ("cuda", "cuda:0") else None]


@pytest.mark.parametrize(
    ("uuid", "processes", "busy"),
    [
        ("bb", (), 0.9),  # cuda:0 of a process that may see the machine's second GPU only
        ("bb", (0, 77), 0.9),  # the process uses both
        ("cc", (0,), None),  # one that NVML does not list, as in MIG: not whatever has its number
        ("cc", (0, 77), 0.1),
        ("", (), 0.1),
    ],
)
def test_the_gpu_beside_a_loader_is_told_by_its_uuid(uuid: str, processes: tuple[int, ...], busy: float | None) -> None:
    gpus = [GpuSample(0, "a", 0.1, 1, 2, processes, "aa"), GpuSample(1, "b", 0.9, 1, 2, (), "bb")]
    info = {"device": "cuda:0", "gpu": uuid}
    before, after = (FoundRing((1, 2), "", 77, snapshot(at, info=info)) for at in (0, 1))
    assert [row.gpu for row in overview([before], [after], gpus)] == [busy]


def test_uuids_of_gpus_are_as_cuda_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=40),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1, total=2),
        nvmlDeviceGetName=lambda handle: b"H200",
        nvmlDeviceGetUUID=lambda handle: b"GPU-5ca1ab1e-0000-0000-0000-000000000001",
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reader = GpuReader()
    reader.sample()
    assert reader.result() == ([GpuSample(0, "H200", 0.4, 1, 2, (), "5ca1ab1e-0000-0000-0000-000000000001")], "")


def test_what_the_feeder_gave_up_is_not_being_read(tmp_path: Path) -> None:
    shape = RingShape(slots=4, slot_bytes=4096, area_bytes=64, threads=1)
    ring = Ring.create(shape)
    ring.trainer[TrainerCounter.GENERATION] = 1
    for slot, status in enumerate((Status.FILLED, Status.CANCELLED, Status.FAILED, None)):
        ring.write_request(slot, slot + 1, slot, 1, b"pieces")
        request = ring.request(slot)
        assert request is not None
        if status is not None:
            ring.write_completion(slot, request, status, bad=0, blob=b"", times=(0, 0), decoded=0)
    now = take_snapshot(ring.fd)
    ring.close()
    assert (now.ready, now.reading) == (1, 1)


def test_exposition_is_what_prometheus_reads() -> None:
    counters = {TrainerCounter.TOKENS: 12345, TrainerCounter.NEXT_NS: 2 * 10**9, TrainerCounter.WAITS: 3}
    text = exposition(snapshot(0, counters, info={"rank": 0, "dataset": 'a"b\\c\nd'}))
    assert 'hsloader_tokens_total{rank="0",job="",split="",dataset="a\\"b\\\\c\\nd"} 12345\n' in text
    line = re.compile(r'(?:# (?:HELP|TYPE) .+|[a-z_]+\{(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)+\} [0-9.e+-]+)\Z')
    assert all(line.match(part) for part in text.splitlines())
    buckets = [float(part.rpartition(" ")[2]) for part in text.splitlines() if "_bucket" in part]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 3


def test_dashboard_asks_only_for_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    text = exposition(snapshot())
    known = {part.split("{")[0] for part in text.splitlines() if not part.startswith("#")}
    asked = set(re.findall(r"hsloader_[a-z_]+", json.dumps(dashboard["panels"])))
    assert asked
    assert asked <= known
