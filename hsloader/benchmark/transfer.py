"""Measures copies into GPU memory, and the pipeline into it, where torch finds a CUDA device."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.benchmark.pipeline import Batches, client_for
from hsloader.benchmark.results import Measurement
from hsloader.benchmark.timing import Deadline
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
    """Read ``batches`` again and again into a pinned ring and copy each to the GPU on a side stream.

    The rate counts from the batch that used the last fresh slot: by then the ring is pinned, which takes 0.4 s a GiB.
    """
    with client_for(dataset, batches, options) as client, contextlib.ExitStack() as stack:
        copies = _Copies(batches.slot_bytes, stack)
        begun = time.monotonic()
        first = last = started = 0.0
        size = count = asked = 0
        running: deque[tuple[int, Any]] = deque()
        while not started or time.monotonic() - started < seconds:
            while client.submit(asked, batches.requests[asked % len(batches.requests)]):
                asked += 1
            filled = client.wait(count, _PATIENCE)
            if filled is None:
                raise TimeoutError(f"{dataset.path}: a batch was not there after {_PATIENCE:.0f} s")
            running.append((count, copies.start(filled.memory, batches.sizes[count % len(batches.sizes)])))
            count += 1
            if len(running) < 2:
                continue
            key, done = running.popleft()
            done.synchronize()
            client.done(key)
            last = time.monotonic()
            first = first or last
            if key == client.slots - 1:
                started = last
            elif started:
                size += batches.sizes[key % len(batches.sizes)]
        threads, mode = int(client.stats()["decode_threads"]), client.mode
    elapsed = max(1e-6, last - started)
    return Measurement(
        part="pipeline",
        name=f"into GPU memory, {mode}, {threads} threads",
        rate=size / elapsed,
        size=size,
        seconds=elapsed,
        state="warm",
        settings={"mode": mode, "threads": threads, "batches": count, "device": "cuda"},
        first_seconds=first - begun,
    )


class _Copies:
    """Copies slots of a ring to one of two buffers of the GPU, on a stream of its own; unpins the slots at the end."""

    def __init__(self, slot_bytes: int, stack: contextlib.ExitStack) -> None:
        torch: Any = importlib.import_module("torch")
        self._torch = torch
        self._runtime = torch.cuda.cudart()
        self._stream = torch.cuda.Stream()
        self._targets = [torch.empty(slot_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._pinned: dict[int, Any] = {}
        self._turn = 0
        stack.callback(self._end)

    def start(self, slot: npt.NDArray[np.uint8], size: int) -> Any:
        """Start the copy of a slot's first ``size`` bytes; the event that it sets when it is done."""
        torch = self._torch
        memory = torch.from_numpy(slot)
        if memory.data_ptr() not in self._pinned:
            self._runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            self._pinned[memory.data_ptr()] = memory
        self._turn ^= 1
        with torch.cuda.stream(self._stream):
            length = min(size, len(self._targets[0]))
            self._targets[self._turn][:length].copy_(memory[:length], non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return done

    def _end(self) -> None:
        self._stream.synchronize()
        for address in self._pinned:
            self._runtime.cudaHostUnregister(address)
        self._pinned.clear()
