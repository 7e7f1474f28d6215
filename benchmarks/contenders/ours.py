"""hsloader: ``convert``, then ``DataLoader(trainer="raw")``: whole samples, views of its ring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hsloader
from contenders.common import Sample

NAME = "hsloader"
HOLDS = "bfloat16"
SETTINGS = [{"mode": mode, "threads": None} for mode in ("auto", "mmap", "pread", "direct")]


def convert(source: Path, target: Path) -> None:
    """See the package."""
    hsloader.convert(source, target)


class _Loader:
    def __init__(self, target: Path, batch: int, options: hsloader.ReadOptions) -> None:
        self._loader = hsloader.DataLoader(target, trainer="raw", batch_size=batch, drop_last=False, read=options)

    def epoch(self) -> Iterator[list[Sample]]:
        return iter(self._loader)


def opened(target: Path, batch: int, *, mode: str, threads: int | None) -> _Loader:
    """See the package."""
    return _Loader(target, batch, hsloader.ReadOptions(mode=mode, threads=threads))  # type: ignore[arg-type]
