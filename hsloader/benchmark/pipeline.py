"""Measures the pipeline: a dataset's samples, read, checked and decoded into the ring by a feeder process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsloader.benchmark.residency import drop, is_told, resident_share, state_of
from hsloader.benchmark.results import Measurement, State
from hsloader.benchmark.timing import process_cpu
from hsloader.errors import HsloaderError
from hsloader.reader.choices import usual_budget
from hsloader.reader.client import FeederClient
from hsloader.reader.counters import FeederCounter
from hsloader.reader.engine import MOST_ENGINES
from hsloader.reader.limits import memory_available
from hsloader.reader.options import Mode, ReadOptions
from hsloader.reader.pieces import PIECES, BatchRequest, span_offsets
from hsloader.store.dataset import Dataset

__all__ = ["Batches", "client_for", "drop_dataset", "make_batches", "measure_pipeline"]

_LEAST_STEADY = 4  # batches of a steady state
_PATIENCE = 60.0  # seconds for one batch, after which the disk is called stuck


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of whole samples: what to ask for, their decoded bytes, and where their samples lie."""

    requests: Sequence[BatchRequest]
    sizes: Sequence[int]
    samples: Sequence[npt.NDArray[np.int64]]
    slot_bytes: int


def make_batches(dataset: Dataset, samples: npt.NDArray[np.int64], batch_bytes: int) -> Batches:
    """Put ``samples`` into batches of at most ``batch_bytes`` decoded bytes (at least one sample), in their order."""
    widths = [field.row_bytes for field in dataset.fields.values()]
    rows = max(1, batch_bytes // sum(widths))
    requests, sizes, members = [], [], []
    held: list[int] = []
    total = 0
    for sample in samples.tolist():
        length = int(dataset.lengths[sample])
        if held and total + length > rows:
            members.append(np.array(held, np.int64))
            held, total = [], 0
        held.append(sample)
        total += length
    if held:
        members.append(np.array(held, np.int64))
    for group in members:
        lengths = dataset.lengths[group]
        count = int(lengths.sum())
        requests.append(BatchRequest((count,) * len(widths), _pieces(group, lengths, len(widths))))
        sizes.append(count * sum(widths))
    slot = max((span_offsets(request.rows, widths)[1] for request in requests), default=1)
    return Batches(requests, sizes, members, slot)


def _pieces(group: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.void]:
    pieces = np.zeros(fields * len(group), PIECES)
    pieces["field_index"] = np.repeat(np.arange(fields), len(group))
    pieces["sample"] = np.tile(group, fields)
    pieces["stop"] = np.tile(lengths, fields)
    pieces["dest_row"] = np.tile(np.cumsum(lengths) - lengths, fields)
    return pieces


def budget_for(slot_bytes: int, options: ReadOptions) -> int:
    """Bytes of the ring that a loader would take; ``HsloaderError`` if the memory for it is not there."""
    budget = usual_budget(options, slot_bytes, 1)
    if budget > memory_available() // 2:
        raise HsloaderError(
            f"a ring of three batches of {slot_bytes:,} bytes is more than half of the memory left; give a smaller "
            "tokens_per_step"
        )
    return budget


def measure_pipeline(
    dataset: Dataset, batches: Batches, seconds: float, *, mode: Mode, threads: int | None, name: str
) -> Measurement:
    """Read ``batches`` as fast as the feeder can for about ``seconds``; again and again if their pages are in memory.

    The rate is that of the steady state: from the batch that used the last fresh slot of the ring to the last request,
    so that the ring is full of requests at both ends. Where there are too few batches it is that of all of them, from
    the moment the feeder looks for requests. ``first_seconds`` counts from the construction of the client.
    """
    state = _state(dataset, batches)
    # A feeder that drops the pages it has read would make the next measurement of the same samples a cold one.
    options = ReadOptions(mode=mode, threads=threads, drop_pages=False)
    begun = time.monotonic()
    with client_for(dataset, batches, options) as client:
        run = _consume(client, batches, seconds, again=state == "warm")
        ready = int(client.ring.feeder[FeederCounter.READY_AT]) / 1e9
        stats = client.stats()
        chosen = client.mode
    size, elapsed, cpu = run.steady(ready or begun)
    return Measurement(
        part="pipeline",
        name=name,
        rate=size / elapsed,
        size=size,
        seconds=elapsed,
        state=state,
        settings={
            "mode": chosen,
            "threads": int(stats["decode_threads"]),
            "io_threads": int(stats["read_threads"]),
            "batches": len(run.marks),
        },
        first_seconds=run.marks[0].at - begun,
        cpu_seconds_a_gb=cpu / (size / 1e9),
        note=f"{stats['bad_samples']:.0f} samples are damaged" if stats["bad_samples"] else "",
    )


def client_for(dataset: Dataset, batches: Batches, options: ReadOptions) -> FeederClient:
    """A client for these batches, with the ring that a loader would take."""
    return FeederClient(
        dataset,
        list(dataset.fields),
        slot_bytes=batches.slot_bytes,
        budget=budget_for(batches.slot_bytes, options),
        pieces=max(len(request.pieces) for request in batches.requests),
        options=options,
        info={"job": "hsloader bench"},
    )


@dataclass(frozen=True, slots=True)
class _Mark:
    """A batch was handed out: when, bytes so far, processor seconds so far (feeder and this process)."""

    at: float
    size: int
    cpu: float


@dataclass(frozen=True, slots=True)
class _Run:
    """A mark for each batch, and how many there were when the last request was made; ``start``: the beginning."""

    start: _Mark
    marks: Sequence[_Mark]
    last_asked: int
    slots: int

    def steady(self, ready: float) -> tuple[int, float, float]:
        """(bytes, seconds, processor seconds) of the steady state, or of all if that is too short."""
        first, last = self.slots - 1, min(self.last_asked, len(self.marks)) - 1
        if last - first >= _LEAST_STEADY:
            begin, end = self.marks[first], self.marks[last]
            return end.size - begin.size, max(1e-6, end.at - begin.at), end.cpu - begin.cpu
        end = self.marks[-1]
        return end.size, max(1e-6, end.at - ready), end.cpu - self.start.cpu


def _consume(client: FeederClient, batches: Batches, seconds: float, *, again: bool) -> _Run:
    """Take batches until they (unless ``again``) or the time, counted from the first batch, are over."""
    total = len(batches.requests)
    readers: list[int] = []

    def mark(size: int) -> _Mark:
        return _Mark(time.monotonic(), size, time.process_time() + sum(map(process_cpu, readers)))

    start = mark(0)
    marks: list[_Mark] = []
    asked = last_asked = size = 0
    while again or len(marks) < total:
        while (again or asked < total) and client.submit(asked, batches.requests[asked % total]):
            asked += 1
            last_asked = len(marks)
        readers = _readers(client)
        key = len(marks)
        if client.wait(key, _PATIENCE) is None:
            raise TimeoutError(f"{client.dataset_path}: a batch was not there after {_PATIENCE:.0f} s")
        client.done(key)
        size += batches.sizes[key % total]
        marks.append(mark(size))
        if marks[-1].at > marks[0].at + seconds and len(marks) >= min(total, 2 * client.slots):
            break
    return _Run(start, marks, len(marks) if asked > len(marks) else last_asked, client.slots)


def _readers(client: FeederClient) -> list[int]:
    """The processes that read for a client, beside this one."""
    helpers = client.ring.feeder[FeederCounter.HELPERS : FeederCounter.HELPERS + MOST_ENGINES].tolist()
    return [pid for pid in (client.pid, *helpers) if pid and pid != os.getpid()]


def _shard_ranges(dataset: Dataset, sample: int) -> Iterator[tuple[int, int, int]]:
    """(descriptor, start, stop) of where the widest field of a sample lies; the descriptor is open during the step."""
    name = max(dataset.fields.values(), key=lambda field: field.row_bytes).name
    array = dataset.segments[int(dataset.segment_of[sample])].array(name)
    first = int(dataset.first_rows[sample]) // array.chunk_rows
    last = (int(dataset.first_rows[sample] + dataset.lengths[sample]) - 1) // array.chunk_rows
    for shard in range(first // array.shard_chunks, last // array.shard_chunks + 1):
        handle = array.open_shard(shard)
        low = max(first - shard * array.shard_chunks, 0)
        high = min(last - shard * array.shard_chunks, array.shard_chunks - 1)
        places = handle.index[low : high + 1].astype(np.int64)
        yield handle.fd, int(places[:, 0].min()), int(places.sum(axis=1).max())


def _state(dataset: Dataset, batches: Batches, looked_at: int = 32) -> State:
    """What the page cache holds of the samples (of at most ``looked_at`` of them)."""
    samples = np.concatenate(list(batches.samples))
    some = samples[np.linspace(0, len(samples) - 1, min(len(samples), looked_at)).astype(np.int64)]
    shares = []
    for sample in some.tolist():
        for fd, start, stop in _shard_ranges(dataset, sample):
            if not is_told(fd):
                return "mixed"
            shares.append(resident_share(fd, start, stop))
    found = state_of(sum(shares) / max(1, len(shares)))
    return "cold" if found == "cold" else "warm" if found == "warm" else "mixed"


def drop_dataset(dataset: Dataset) -> None:
    """Drop the dataset's shards from the page cache: of a scratch dataset, or where the caller asked for it."""
    for segment in dataset.segments:
        for name in dataset.fields:
            array = segment.array(name)
            for shard in range(array.shards):
                with contextlib.suppress(OSError):
                    fd = os.open(array.shard_path(shard), os.O_RDONLY | os.O_CLOEXEC)
                    try:
                        drop(fd)
                    finally:
                        os.close(fd)
