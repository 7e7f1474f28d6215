"""Segment numbers: each is given out once, also to writers that never use it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hsloader.store.checks import parse_json
from hsloader.store.files import read_limited, replace_file
from hsloader.store.zarr_json import json_bytes

__all__ = ["Numbers", "Reservations"]

_NUMBERS_LIMIT = 10**12
_SIZE_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers given out: all below ``next``; ``held`` ranges (first, count) belong to a journal."""

    next: int
    held: tuple[tuple[int, int], ...] = ()


class Reservations:
    """The file that keeps the numbers, and the segments that exist; used under the dataset's lock."""

    def __init__(self, path: Path, segments: Path, scratch: Path) -> None:
        self._path = path
        self._segments = segments
        self._scratch = scratch

    def read(self) -> Numbers:
        """The numbers given out, taking in segments that the file does not know (a copied dataset has no file)."""
        stored = Numbers(0)
        if self._path.exists():
            node = parse_json(read_limited(self._path, _SIZE_LIMIT, "the numbers file"), self._path)
            held = [
                (item.integer("first", 0, _NUMBERS_LIMIT), item.integer("count", 1, _NUMBERS_LIMIT))
                for item in node.nodes("held")
            ]
            stored = Numbers(node.integer("next", 0, _NUMBERS_LIMIT), tuple(held))
        names = [path.name for path in self._segments.iterdir()] if self._segments.is_dir() else []
        return replace(stored, next=max([stored.next, *(int(name) + 1 for name in names if name.isdigit())]))

    def write(self, numbers: Numbers) -> None:
        """Keep the numbers, durably."""
        held = [{"first": first, "count": count} for first, count in numbers.held]
        replace_file(self._path, json_bytes({"next": numbers.next, "held": held}), scratch=self._scratch)
