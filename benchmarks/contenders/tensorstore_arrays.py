"""tensorstore: the same sharded zarr v3 arrays as ``zarr_python``, written and read by it, as bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore

from contenders.common import CORES, FIELDS, Sample, Threads, from_bits, row_blocks, sample_ends
from contenders.zarr_python import CHUNK_ROWS, SHARD_ROWS

NAME = "tensorstore"
HOLDS = "bfloat16"
SETTINGS = [{"threads": n, "io": io} for n, io in ((0, 32), (CORES // 2, 32))]


def _spec(target: Path, name: str, bits: Any, rows: int) -> dict[str, Any]:
    chunk = CHUNK_ROWS if bits.ndim > 1 else SHARD_ROWS
    kind = "bfloat16" if bits.dtype == np.uint16 else bits.dtype.name
    rest = list(bits.shape[1:])
    blosc = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": bits.dtype.itemsize, "blocksize": 0}
    inner = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "blosc", "configuration": blosc}]
    sharding = {"chunk_shape": [chunk, *rest], "codecs": inner}
    grid = {"name": "regular", "configuration": {"chunk_shape": [SHARD_ROWS, *rest]}}
    metadata = {
        "shape": [rows, *rest],
        "data_type": kind,
        "chunk_grid": grid,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{target}/{name}"}, "metadata": metadata}


def convert(source: Path, target: Path) -> None:
    """See the package."""
    ends = sample_ends(source)
    arrays: dict[str, Any] = {}
    # Whole shards at a time: a shard is written anew with every write to it.
    for first, block in row_blocks(source, SHARD_ROWS):
        for name, bits in block.items():
            if name not in arrays:
                arrays[name] = tensorstore.open(_spec(target, name, bits, int(ends[-1])), create=True).result()
            values = bits.view(ml_dtypes.bfloat16) if bits.dtype == np.uint16 else bits
            arrays[name][first : first + len(bits)].write(values).result()
    np.save(target / "ends.npy", ends)


def opened(target: Path, batch: int, *, threads: int, io: int) -> Threads:
    """See the package."""
    context = tensorstore.Context({"file_io_concurrency": {"limit": io}, "cache_pool": {"total_bytes_limit": 0}})
    arrays = {}
    for name in FIELDS:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{target}/{name}"}}
        arrays[name] = tensorstore.open(spec, context=context, read=True).result()
    ends = np.load(target / "ends.npy")

    def read(index: int) -> Sample:
        first, last = (ends[index - 1] if index else 0), ends[index]
        reads = {name: arrays[name][first:last].read() for name in FIELDS}
        found = {name: read.result() for name, read in reads.items()}
        return {name: from_bits(a.view(np.uint16) if a.dtype.name == "bfloat16" else a) for name, a in found.items()}

    return Threads(read, len(ends), batch, threads)
