"""verify: reads a dataset as a sceptic does and lists everything that is not as it was sealed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hsloader.errors import DamageError, IncompatibleError
from hsloader.store.manifest import Manifest, read_manifest
from hsloader.store.packed import read_tables
from hsloader.store.problems import Problem
from hsloader.store.samples import COLUMNS, Table
from hsloader.store.segment_check import SegmentCheck, check_groups
from hsloader.store.stored_segment import Segment

__all__ = ["Problem", "VerifyReport", "verify"]

_THREADS = 8

Progress = Callable[[int, int], None]


@dataclass(kw_only=True, slots=True)
class VerifyReport:
    """What ``verify`` found. ``checked_samples``: those whose every value was read; ``bytes_read`` of shards."""

    path: str
    fingerprint: str | None = None
    samples: int = 0
    segments: int = 0
    checked_samples: int = 0
    chunks: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        head = f"{self.path}: {self.checked_samples:,} of {self.samples:,} samples checked, {self.chunks:,} chunks"
        if self.ok:
            return f"{head}: sound"
        return "\n".join([f"{head}: {len(self.problems)} problems", *(f"  {problem}" for problem in self.problems)])


def verify(
    path: str | os.PathLike[str],
    sample: int | None = None,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
) -> VerifyReport:
    """Check the dataset at ``path`` against its own digests and return a report; nothing is changed.

    Every frame is read, its crc32c compared, decoded; digests are computed anew; gaps and padding must be zero; names
    must be unique; lengths and loss tokens must be those of the data. ``sample``: read only that many samples, spread
    evenly, and of the other shards no more than that they are there and have their size. ``progress``: called with
    (bytes read, bytes to read) of the shards, from any thread.

    Raises ``FileNotFoundError`` or ``DatasetError`` where there is no dataset and ``IncompatibleError`` for another
    format; damage is in the report.
    """
    root = Path(path)
    report = VerifyReport(path=str(root))
    try:
        manifest = read_manifest(root)
    except DamageError as error:
        report.problems.append(Problem("manifest", str(root / "manifest.json"), str(error)))
        return report
    report.fingerprint = manifest.fingerprint
    report.samples, report.segments = manifest.samples, len(manifest.segments)
    report.problems += check_groups(root)
    chosen = None if sample is None else _spread(sample, manifest.samples)
    checks = _segment_checks(root, manifest, chosen)
    counter = _Counter(progress)
    with ThreadPoolExecutor(threads or min(_THREADS, len(os.sched_getaffinity(0))), "hsloader-verify") as pool:
        list(pool.map(SegmentCheck.open, checks))
        tasks = [task for check in checks for task in check.tasks()]
        counter.total = sum(task.size for task in tasks)
        for found in pool.map(lambda task: task.run(counter.add), tasks):
            report.problems += found
    report.problems += _check_packed(root, manifest, checks)
    for check in checks:
        report.problems += check.close()
        report.checked_samples += check.checked_samples
    report.problems += _check_names(checks)
    report.bytes_read, report.chunks = counter.done, counter.chunks
    return report


def _spread(count: int, samples: int) -> list[int]:
    if count < 1:
        raise ValueError(f"sample is {count}; expected at least 1, or None for all")
    return sorted({int(i) for i in np.linspace(0, samples - 1, min(count, samples)).round()}) if samples else []


def _segment_checks(root: Path, manifest: Manifest, chosen: list[int] | None) -> list[SegmentCheck]:
    checks, first = [], 0
    for entry in manifest.segments:
        own = None if chosen is None else [i - first for i in chosen if first <= i < first + entry.samples]
        checks.append(SegmentCheck(Segment(root, entry, manifest.fields), own))
        first += entry.samples
    return checks


def _check_packed(root: Path, manifest: Manifest, checks: list[SegmentCheck]) -> list[Problem]:
    """The packed table is what readers believe: it must be sound and equal to the segments' own tables."""
    if manifest.packed is None:
        return []
    path = str(root / manifest.packed.path)
    try:
        packed = read_tables(root, manifest.first(manifest.packed.segments))
    except (DamageError, IncompatibleError) as error:
        return [Problem("packed", path, str(error))]
    problems, start = [], 0
    for check in checks[: manifest.packed.segments]:
        samples = check.segment.entry.samples
        part = packed[:, start : start + samples]
        if check.table is not None and not np.array_equal(part, check.table):
            problems.append(Problem("packed", path, f"differs from {check.segment.path / 'samples'}"))
        start += samples
    return problems


def _check_names(checks: list[SegmentCheck]) -> list[Problem]:
    """Names are unique in the dataset: equal keys are looked up, equal names are a problem."""
    tables: list[Table] = [check.table for check in checks if check.table is not None]
    if not tables:
        return []
    keys = np.concatenate([table[COLUMNS.index("key")] for table in tables])
    values, counts = np.unique(keys, return_counts=True)
    twice = set(values[counts > 1].tolist())
    seen: dict[str, str] = {}
    problems = []
    for check in checks if twice else []:
        for name in check.names_with(twice):
            if name in seen:
                text = f"the name {name!r} occurs twice, also in {seen[name]}"
                problems.append(Problem("names", str(check.segment.path), text, samples=(name,)))
            seen[name] = str(check.segment.path)
    return problems


class _Counter:
    """Counts over threads and passes the count on."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self.total = self.done = self.chunks = 0

    def add(self, size: int, chunks: int) -> None:
        with self._lock:
            self.done += size
            self.chunks += chunks
            if self._progress is not None:
                self._progress(self.done, self.total)
