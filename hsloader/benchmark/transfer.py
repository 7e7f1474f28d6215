"""Measures copies into GPU memory, and the pipeline into it, where torch finds a CUDA device."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hsloader.benchmark.pipeline import Batches, client_for
from hsloader.benchmark.results import Measurement
from hsloader.benchmark.timing import Deadline
from hsloader.reader.counters import FeederCounter
from hsloader.reader.options import ReadOptions
from hsloader.store.dataset import Dataset

__all__ = ["gpu_problem", "measure_pipeline_to_gpu", "measure_transfer"]

_MIB = 1 << 20
_PATIENCE = 60.0


def gpu_problem() -> str:
    """Why nothing can be copied to a GPU; empty if it can. Imports torch."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    torch: Any = importlib.import_module("torch")
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def measure_transfer(deadline: Deadline, *, progress: Callable[[str], None] = lambda name: None) -> list[Measurement]:
    """Host-to-device copies from pinned and from pageable memory, timed by events."""
    torch: Any = importlib.import_module("torch")
    found: list[Measurement] = []
    for kind, size in (("pinned", 64 * _MIB), ("pinned", 4 * _MIB), ("pageable", 64 * _MIB)):
        if deadline.left < 0.2 and found:
            break
        name = f"{kind} memory, {size // _MIB} MiB a copy"
        progress(f"transfer, {name}")
        source = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        target = torch.empty(size, dtype=torch.uint8, device="cuda")
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        count = 16 if size > 8 * _MIB else 128
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        found.append(
            Measurement(
                part="transfer",
                name=name,
                rate=count * size / seconds,
                size=count * size,
                seconds=seconds,
                settings={"memory": kind, "block": size, "gpu": torch.cuda.get_device_name()},
            )
        )
    return found


def measure_pipeline_to_gpu(dataset: Dataset, batches: Batches, seconds: float, options: ReadOptions) -> Measurement:
    """Read ``batches`` into a pinned ring and copy each to the GPU on a side stream, one copy a batch."""
    torch: Any = importlib.import_module("torch")
    runtime = torch.cuda.cudart()
    stream = torch.cuda.Stream()
    targets = [torch.empty(batches.slot_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pinned: dict[int, Any] = {}
    running: deque[tuple[int, Any]] = deque()
    begun = time.monotonic()
    size = count = asked = 0
    first = last = 0.0
    with client_for(dataset, batches, options) as client:
        try:
            while count < len(batches.requests):
                while asked < len(batches.requests) and client.submit(asked, batches.requests[asked]):
                    asked += 1
                filled = client.wait(count, _PATIENCE)
                if filled is None:
                    raise TimeoutError(f"{dataset.path}: a batch was not there after {_PATIENCE:.0f} s")
                memory = torch.from_numpy(filled.memory)
                if memory.data_ptr() not in pinned:
                    runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
                    pinned[memory.data_ptr()] = memory
                with torch.cuda.stream(stream):
                    length = min(batches.sizes[count], batches.slot_bytes)
                    targets[count % 2][:length].copy_(memory[:length], non_blocking=True)
                    done = torch.cuda.Event()
                    done.record(stream)
                running.append((count, done))
                if len(running) > 1:
                    key, event = running.popleft()
                    event.synchronize()
                    client.done(key)
                    last = time.monotonic()
                    first = first or last
                size += batches.sizes[count]
                count += 1
                if time.monotonic() - begun > seconds:
                    break
            stream.synchronize()
            last = time.monotonic()
            ready = int(client.ring.feeder[FeederCounter.READY_AT]) / 1e9
            threads = int(client.stats()["decode_threads"])
            mode = client.mode
        finally:
            stream.synchronize()
            for address in pinned:
                runtime.cudaHostUnregister(address)
    elapsed = max(1e-6, last - (ready or begun))
    return Measurement(
        part="pipeline",
        name=f"into GPU memory, {mode}, {threads} threads",
        rate=size / elapsed,
        size=size,
        seconds=elapsed,
        state="warm",
        settings={"mode": mode, "threads": threads, "batches": count, "device": "cuda"},
        first_seconds=(first or last) - begun,
    )
