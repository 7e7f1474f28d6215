"""zarr-python with zarrs, the codec pipeline in Rust: the same arrays as ``zarr_python``."""

from __future__ import annotations

from pathlib import Path

import zarr

from contenders import zarr_python
from contenders.common import CORES, Threads

NAME = "zarr with zarrs"
HOLDS = "uint16"
SETTINGS = [{"threads": n} for n in (0, CORES // 2)]


def _use() -> None:
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})


def convert(source: Path, target: Path) -> None:
    """See the package."""
    _use()
    zarr_python.convert(source, target)


def opened(target: Path, batch: int, *, threads: int) -> Threads:
    """See the package."""
    _use()
    return zarr_python.reader(target, batch, threads)
