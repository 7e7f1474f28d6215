"""zarr-python alone: sharded zarr v3 arrays, Blosc zstd with byte shuffle, samples one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zarr

from contenders.common import CORES, FIELDS, Sample, Threads, from_bits, row_blocks, sample_ends

NAME = "zarr-python"
HOLDS = "uint16"
SETTINGS = [{"threads": n, "concurrency": c} for n, c in ((0, 10), (0, 64), (CORES // 2, 10))]
CHUNK_ROWS, SHARD_ROWS = 32, 4096


def convert(source: Path, target: Path) -> None:
    """See the package."""
    group = zarr.create_group(str(target), overwrite=True)
    ends = sample_ends(source)
    arrays: dict[str, Any] = {}
    # Whole shards at a time: a shard is written anew with every write to it.
    for first, block in row_blocks(source, SHARD_ROWS):
        for name, bits in block.items():
            if name not in arrays:
                arrays[name] = _array(group, name, bits, int(ends[-1]))
            arrays[name][first : first + len(bits)] = bits
    group.create_array("ends", data=ends)


def _array(group: Any, name: str, bits: Any, rows: int) -> Any:
    chunk = CHUNK_ROWS if bits.ndim > 1 else SHARD_ROWS
    return group.create_array(
        name,
        shape=(rows, *bits.shape[1:]),
        dtype=bits.dtype,
        chunks=(chunk, *bits.shape[1:]),
        shards=(SHARD_ROWS, *bits.shape[1:]),
        compressors=zarr.codecs.BloscCodec(cname="zstd", clevel=1, shuffle="shuffle"),
    )


def reader(target: Path, batch: int, threads: int) -> Threads:
    """Reads whole samples by row ranges."""
    group: Any = zarr.open_group(str(target), mode="r")
    arrays: dict[str, Any] = {name: group[name] for name in FIELDS}
    ends = group["ends"][:]

    def read(index: int) -> Sample:
        first, last = (ends[index - 1] if index else 0), ends[index]
        return {name: from_bits(np.asarray(arrays[name][first:last])) for name in FIELDS}

    return Threads(read, len(ends), batch, threads)


def opened(target: Path, batch: int, *, threads: int, concurrency: int) -> Threads:
    """See the package."""
    zarr.config.set({"async.concurrency": concurrency})
    return reader(target, batch, threads)
