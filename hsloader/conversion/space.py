"""How much room a run needs at its destination, and whether it is there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hsloader.errors import ConversionError

__all__ = [
    "SegmentSize",
    "bytes_text",
    "demand_space",
    "existing_parent",
    "most_ahead",
    "peak_bytes",
    "same_file_system",
]

_MARGIN = 1.02  # of what was predicted
_SLACK = 32 << 20  # metadata, journals, the directory itself


@dataclass(frozen=True, slots=True)
class SegmentSize:
    """One segment to come: what it will take, and what is freed when it is listed (delete_source)."""

    stored: int
    freed: int = 0


def most_ahead(workers: int) -> int:
    """How many segments, from the first that is not listed on, may be begun or finished at a time.

    Segments are listed in order. A bound keeps what waits for a slow one from filling the disk; twice the workers keeps
    them busy meanwhile.
    """
    return workers if workers == 1 else 2 * workers


def peak_bytes(sizes: Sequence[SegmentSize], in_flight: int) -> int:
    """The most that is ever taken at once, beyond what is taken now.

    Sources go when their segment is listed; ``in_flight`` segments are written and not listed at the same time (see
    ``most_ahead``).
    """
    if not sizes:
        return 0
    taken = peak = 0
    for i, size in enumerate(sizes):
        ahead = sum(other.stored for other in sizes[i : i + in_flight])
        peak = max(peak, taken + ahead)
        taken += size.stored - size.freed
    return int(max(peak, taken) * _MARGIN) + _SLACK


def existing_parent(path: Path) -> Path:
    """The path itself, or the closest folder above it that exists."""
    for place in (path, *path.absolute().parents):
        if place.exists():
            return place
    return Path("/")


def same_file_system(one: Path, other: Path) -> bool:
    """Whether deleting in one place makes room in the other."""
    return existing_parent(one).stat().st_dev == existing_parent(other).stat().st_dev


def free_bytes(path: Path) -> int:
    """What this user may still write at ``path``."""
    return shutil.disk_usage(existing_parent(path)).free


def demand_space(needed: int, destination: Path, can_delete: bool) -> None:
    """``ConversionError`` with the numbers unless ``needed`` bytes are free at ``destination``."""
    free = free_bytes(destination)
    if needed <= free:
        return
    remedy = (
        " Sources and destination share a file system: with delete_source each segment's sources are removed once it "
        "is read back, and much less is needed at a time."
        if can_delete
        else ""
    )
    raise ConversionError(
        f"{destination}: not enough room: about {bytes_text(needed)} are needed, {bytes_text(free)} are free "
        f"({bytes_text(needed - free)} too few). Nothing was written.{remedy}"
    )


def bytes_text(size: float) -> str:
    """Bytes for a person."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
