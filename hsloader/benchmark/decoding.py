"""Measures checking and decoding frames that lie in memory, in 1 to N threads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsloader.benchmark.results import Measurement
from hsloader.benchmark.timing import Deadline, run_threads
from hsloader.store.codec import Codec
from hsloader.store.dataset import Dataset

__all__ = ["Frames", "frames_of", "measure_decoding", "thread_counts"]

_LEAST_FRAMES = 4


@dataclass(frozen=True, slots=True)
class Frames:
    """Encoded chunks of one field, in memory."""

    codec: Codec
    frames: Sequence[bytes]

    @property
    def ratio(self) -> float:
        """Decoded over encoded bytes."""
        return len(self.frames) * self.codec.chunk_bytes / max(1, sum(map(len, self.frames)))


def frames_of(dataset: Dataset, most: int) -> Frames | None:
    """Frames of the dataset's widest field, about ``most`` encoded bytes of them; None if it has no rows."""
    name = max(dataset.fields.values(), key=lambda field: field.row_bytes).name
    frames: list[bytes] = []
    size = 0
    for segment in dataset.segments:
        array = segment.array(name)
        for shard in range(array.shards):
            handle = array.open_shard(shard)
            for offset, length in handle.index[: array.records[shard].chunks].tolist():
                if size >= most and len(frames) >= _LEAST_FRAMES:
                    return Frames(array.codec, frames)
                frames.append(os.pread(handle.fd, min(length, array.codec.max_frame_bytes), offset))
                size += len(frames[-1])
        if frames:
            return Frames(array.codec, frames)  # frames of one codec: other segments may have other chunks
    return None


def thread_counts(most: int) -> list[int]:
    """1, 2, 4 ... and ``most``."""
    doubled = itertools.takewhile(lambda n: n < most, (1 << k for k in itertools.count()))
    return [*doubled, max(1, most)]


def measure_decoding(
    frames: Frames,
    threads: Sequence[int],
    deadline: Deadline,
    *,
    seconds: float = 0.7,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Measurement]:
    """Decoded bytes a second for each number of threads."""
    found: list[Measurement] = []
    codec = frames.codec
    outs = [np.empty(codec.chunk_bytes, np.uint8) for _ in range(max(threads))]
    views = [memoryview(frame) for frame in frames.frames]
    for number, count in enumerate(threads):
        if deadline.left < 0.05 and found:
            break
        name = f"{count} thread{'s' if count > 1 else ''}"
        progress(f"decode, {name}")
        turns = itertools.count()
        step = _decoder(codec, views, outs, turns)
        timed = run_threads(step, count, deadline.share(seconds, len(threads) - number))
        found.append(
            Measurement(
                part="decode",
                name=name,
                rate=timed.rate,
                size=timed.size,
                seconds=timed.seconds,
                settings={"threads": count, "field": codec.field.name, "chunk": codec.chunk_bytes},
                cpu_seconds_a_gb=timed.cpu / max(1e-9, timed.size / 1e9),
            )
        )
    return found


def _decoder(
    codec: Codec, views: Sequence[memoryview], outs: Sequence[npt.NDArray[np.uint8]], turns: itertools.count[int]
) -> Callable[[int], int]:
    def step(thread: int) -> int:
        codec.decode(views[next(turns) % len(views)], outs[thread])
        return codec.chunk_bytes

    return step
