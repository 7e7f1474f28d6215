"""Measures the disk alone: sequential and random reads, buffered and O_DIRECT, at several depths, cold and warm.

The files are a nameless scratch file, which may be dropped from the page cache before each measurement, or the data
at PATH themselves where enough of them is on the disk only; then each measurement reads bytes that none before it
read. Whether the disk was truly asked is checked twice: the page cache before (mincore), the kernel's count of bytes
fetched from storage after. The count is of block devices: on file systems of servers and FUSE it says nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hsloader.benchmark.residency import drop, read_from_disk, resident_share, state_of
from hsloader.benchmark.results import Measurement, State
from hsloader.benchmark.scratch import ScratchFile
from hsloader.benchmark.timing import Deadline, run_threads
from hsloader.reader.modes import file_system
from hsloader.store.pages import page_memory

__all__ = ["DiskPlan", "RawData", "data_files", "measure_disk", "plan_disk"]

_ALIGNMENT = 4096
_MIB = 1 << 20
_LOOKED_AT = 64 << 30  # bytes of data files whose residency is asked for


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """One measurement: ``size`` bytes a read, ``depth`` reads at once; ``unit`` bytes from each random place."""

    pattern: str
    size: int
    depth: int
    way: str
    state: State
    unit: int = 0

    @property
    def name(self) -> str:
        """The line's label."""
        what = "sequential" if self.pattern == "sequential" else f"random samples of {_size(self.unit)}"
        return f"{what}, {_size(self.size)} reads, {self.depth} at once, {self.way}"


def plan_disk(unit: int, *, direct: bool) -> list[DiskPlan]:
    """The measurements, the most telling first: time may run out before the last. ``unit``: bytes of a sample."""
    ways = ["buffered", "O_DIRECT"] if direct else ["buffered"]
    unit = max(_ALIGNMENT, unit // _ALIGNMENT * _ALIGNMENT)
    read = min(unit, 4 * _MIB)
    plans = [DiskPlan("random", read, depth, way, "cold", unit) for depth in (4, 16) for way in ways]
    for size, depth in ((4 * _MIB, 4), (4 * _MIB, 1), (4 * _MIB, 16), (_MIB, 1), (_MIB, 8), (16 * _MIB, 2)):
        plans += [DiskPlan("sequential", size, depth, way, "cold") for way in ways]
    plans.append(DiskPlan("sequential", 4 * _MIB, 1, "buffered", "warm"))
    plans.append(DiskPlan("sequential", 4 * _MIB, 4, "buffered", "warm"))
    return plans


class RawData:
    """Bytes to read: open files as one space. ``may_drop``: their pages may be dropped, as they are ours.

    ``counted``: the kernel counts what it fetches of them.
    """

    def __init__(self, files: Sequence[tuple[int, int, int]], what: str, *, may_drop: bool) -> None:
        self._files = list(files)  # descriptor, O_DIRECT descriptor or -1, size
        self.what = what
        self.may_drop = may_drop
        self.direct = all(direct >= 0 for _, direct, _ in self._files)
        self.size = sum(size for _, _, size in self._files)
        self.counted = all(file_system(f"/proc/self/fd/{fd}")[1] for fd, _, _ in self._files[:1])
        self._used = 0

    @classmethod
    def of(cls, scratch: ScratchFile) -> RawData:
        """The scratch file."""
        return cls([(scratch.fd, scratch.direct, scratch.size)], "a scratch file", may_drop=True)

    def drop(self) -> None:
        """Drop the files' pages if that is allowed."""
        if self.may_drop:
            for fd, _, _ in self._files:
                drop(fd)

    def resident(self, places: Sequence[tuple[int, int, int]]) -> float:
        """The share of these places that is in the page cache."""
        shares = [resident_share(self._files[i][0], start, start + size) for i, start, size in places]
        return sum(shares) / len(shares) if shares else 0.0

    def places(self, unit: int, most: int) -> list[tuple[int, int, int]]:
        """At most ``most`` bytes as (file, offset, size) in pieces of ``unit``, none that was given before."""
        if self.may_drop:
            self._used = 0
        found: list[tuple[int, int, int]] = []
        start, taken = 0, 0
        for i, (_, _, size) in enumerate(self._files):
            first = -(-max(0, self._used - start) // unit) * unit
            for offset in range(first, size - unit + 1, unit):
                if taken + unit > most and found:
                    break
                found.append((i, offset, unit))
                taken += unit
            start += size
        if found:
            last = found[-1]
            self._used = sum(size for _, _, size in self._files[: last[0]]) + last[1] + unit
        return found

    def reads(self, places: Sequence[tuple[int, int, int]], size: int, way: str) -> Iterator[tuple[int, int, int]]:
        """(descriptor, offset, bytes) of each read."""
        for i, start, length in places:
            fd = self._files[i][1 if way == "O_DIRECT" else 0]
            for offset in range(start, start + length, size):
                yield fd, offset, min(size, start + length - offset)

    def close(self) -> None:
        """Close files that were opened by ``data_files``."""
        for fd, direct, _ in self._files:
            for each in (fd, direct):
                if each >= 0:
                    os.close(each)
        self._files = []


def data_files(paths: Iterable[Path], wanted: int, what: str, *, may_drop: bool) -> RawData | None:
    """The files at ``paths``, if ``wanted`` bytes of them are on the disk only (or may be made so); else None."""
    files: list[tuple[int, int, int]] = []
    absent = seen = 0
    try:
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            files.append((fd, -1, os.fstat(fd).st_size))
            seen += files[-1][2]
            share = 0.0 if may_drop else resident_share(fd)
            if share > 0:
                os.close(files.pop()[0])
                continue
            absent += files[-1][2]
            with contextlib.suppress(OSError):
                files[-1] = (fd, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), files[-1][2])
            if absent >= wanted or seen >= _LOOKED_AT:
                break
    except OSError:
        absent = 0
    data = RawData(files, what, may_drop=may_drop)
    if absent < wanted:
        data.close()
        return None
    return data


def measure_disk(
    data: RawData,
    plans: Sequence[DiskPlan],
    deadline: Deadline,
    *,
    most: int,
    seconds: float = 0.7,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Measurement]:
    """Measure each plan: at most ``most`` bytes and about ``seconds`` each, as long as there is time."""
    found = []
    for number, plan in enumerate(plans):
        if deadline.left < 0.1:
            break
        progress(plan.name)
        measured = _measure(data, plan, most, deadline.share(seconds, len(plans) - number))
        if measured is not None:
            found.append(measured)
    return found


def _measure(data: RawData, plan: DiskPlan, most: int, seconds: float) -> Measurement | None:
    warm = plan.state == "warm"
    unit = plan.unit or plan.size
    if warm:
        places = data.places(unit, min(most, 256 * _MIB)) if data.may_drop else data.places(unit, 64 * _MIB)
        for fd, offset, size in data.reads(places, plan.size, "buffered"):
            os.pread(fd, size, offset)
    else:
        data.drop()
        places = data.places(unit, most)
    if not places:
        return None
    if plan.pattern == "random":
        order = np.random.default_rng(0).permutation(len(places))
        places = [places[i] for i in order]
    resident = data.resident(places[:256])
    buffers = [page_memory(plan.size).data for _ in range(plan.depth)]
    reads = iter(list(data.reads(places, plan.size, plan.way)))

    def step(thread: int) -> int:
        place = next(reads, None)  # one step of a list's iterator is atomic
        if place is None:
            return 0
        fd, offset, size = place
        return os.preadv(fd, [buffers[thread][:size]], offset)

    before = read_from_disk()
    timed = run_threads(step, plan.depth, seconds)
    after = read_from_disk()
    fetched = None if before is None or after is None or not data.counted else after - before
    from_memory = (
        not warm and timed.size > 0 and (resident > 0.5 or (fetched is not None and fetched < timed.size // 2))
    )
    settings = {"pattern": plan.pattern, "block": plan.size, "depth": plan.depth, "way": plan.way}
    return Measurement(
        part="disk",
        name=plan.name,
        rate=timed.rate,
        size=timed.size,
        seconds=timed.seconds,
        state="warm" if warm else _state(resident),
        settings=settings | ({"unit": plan.unit} if plan.unit else {}),
        from_memory=from_memory,
        cpu_seconds_a_gb=timed.cpu / (timed.size / 1e9) if timed.size else None,
        note="served from memory, not by the disk" if from_memory else "",
    )


def _state(share: float) -> State:
    found = state_of(share)
    return "cold" if found == "cold" else "warm" if found == "warm" else "mixed"


def _size(size: int) -> str:
    for factor, unit in ((1 << 30, "GiB"), (_MIB, "MiB"), (1 << 10, "KiB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"
