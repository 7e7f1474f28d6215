"""Measures checking and decoding frames that lie in memory, in 1 to N threads, shared among processes as by a reader.

Threads of one process wait for Python's lock, on small frames most of the time: 16 of them decoded chunks of 0.5 MB
at 4.0 GB/s where 8 gave 7.1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hsloader._launch import Child, LaunchUnavailableError, launch
from hsloader.benchmark.children import hear, tell
from hsloader.benchmark.results import Measurement
from hsloader.benchmark.timing import Deadline, Timed, run_threads
from hsloader.reader.choices import MANY_SLOTS, processes_for
from hsloader.store.codec import Codec, FrameError
from hsloader.store.dataset import Dataset

__all__ = ["Frames", "decode_in_threads", "frames_of", "measure_decoding", "thread_counts"]

_ENTRY = "hsloader.benchmark.decoding_child:main"
_START_SECONDS = 30.0
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
            # Of one codec: other segments may have other chunks.
            return Frames(array.codec, frames)
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
    slots: int = MANY_SLOTS,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Measurement]:
    """Decoded bytes a second for each number of threads, shared among processes as by a reader with so many ``slots``.

    Where no processes can be had, the threads are those of this one.
    """
    found: list[Measurement] = []
    codec = frames.codec
    most = processes_for(max(threads), slots)
    with contextlib.ExitStack() as stack:
        crew = _crew(frames, most, stack) if most > 1 else None
        for number, count in enumerate(threads):
            if deadline.left < 0.05 and found:
                break
            name = f"{count} thread{'s' if count > 1 else ''}"
            progress(f"decode, {name}")
            processes = processes_for(count, slots)
            share = deadline.share(seconds, len(threads) - number)
            if processes > 1 and crew is not None:
                timed = crew.run(count, processes, share)
            else:
                timed = decode_in_threads(codec, [memoryview(frame) for frame in frames.frames], count, share)
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


def decode_in_threads(
    codec: Codec, frames: Sequence[memoryview], threads: int, seconds: float, *, first: int = 0
) -> Timed:
    """Check and decode frames, from number ``first`` on and in turn, in threads of this process."""
    outs = [np.empty(codec.chunk_bytes, np.uint8) for _ in range(threads)]
    turns = itertools.count(first)

    def step(thread: int) -> int:
        codec.decode(frames[next(turns) % len(frames)], outs[thread])
        return codec.chunk_bytes

    return run_threads(step, threads, seconds)


def _crew(frames: Frames, processes: int, stack: contextlib.ExitStack) -> _Crew | None:
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return stack.enter_context(_Crew(frames, processes))
    except (OSError, LaunchUnavailableError):  # a limit of processes, a sandbox
        return None


class _Crew:
    """Processes that decode the same frames, which lie in memory once; its end is theirs."""

    def __init__(self, frames: Frames, processes: int) -> None:
        self._frames = frames
        self._children: list[Child] = []
        memory = os.memfd_create("hsloader-bench", os.MFD_CLOEXEC)
        try:
            edges = [0]
            with open(memory, "wb", closefd=False) as file:
                for frame in frames.frames:
                    edges.append(edges[-1] + file.write(frame))
            for _ in range(processes):
                self._children.append(launch(_ENTRY, fds={"frames": memory}, name="decoding process"))
            codec = frames.codec
            asked = {"field": dataclasses.asdict(codec.field), "chunk_rows": codec.chunk_rows, "edges": edges}
            for child in self._children:
                tell(child, asked, _START_SECONDS)
            for child in self._children:
                hear(child, _START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.close(memory)

    def run(self, threads: int, processes: int, seconds: float) -> Timed:
        """Decode in so many threads, shared among so many of the processes."""
        asked = self._children[:processes]
        for number, child in enumerate(asked):
            count = threads // processes + (number < threads % processes)
            # Each begins elsewhere: else they would find in the caches what another has just read.
            first = number * len(self._frames.frames) // processes
            tell(child, {"threads": count, "seconds": seconds, "first": first}, _START_SECONDS)
        answers = [hear(child, seconds + _START_SECONDS) for child in asked]
        for answer in answers:
            if "error" in answer:
                raise FrameError(answer["error"])
        return Timed(
            size=sum(answer["size"] for answer in answers),
            seconds=max(answer["seconds"] for answer in answers),
            cpu=sum(answer["cpu"] for answer in answers),
        )

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.close(1.0)
