"""Run in a process of its own: lets another zarr implementation read or write arrays for ``test_interop``.

``python -m tests.store.foreign {read|write} LIBRARY FOLDER``: ``read`` saves each array ``FOLDER/NAME`` as
``FOLDER/NAME.npy`` and some rows from its middle as ``FOLDER/NAME.rows.npy``; ``write`` fills it from
``FOLDER/NAME.in.npy``.  Bits throughout.  Of its own, because tensorstore aborts and zarrs hangs after a fork.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROWS = slice(5, 21)  # cuts chunks and crosses the border of two shards

PIPELINES = {
    "zarr": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "zarr-fused": "zarr.core.codec_pipeline.FusedCodecPipeline",
    "zarrs": "zarrs.ZarrsCodecPipeline",
}


def open_tensorstore(path: Path) -> Any:
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return tensorstore.open(spec, open=True).result()


def open_zarr(path: Path) -> Any:
    import zarr

    import hsloader  # noqa: F401 - registers bfloat16, which zarr does not know by itself

    return zarr.open_array(path, mode="r+")


def main(task: str, library: str, folder: Path) -> None:
    if library == "tensorstore":
        opener = open_tensorstore
    else:
        import zarr

        # Strict: zarrs refuses what it cannot do instead of handing it to zarr-python.
        zarr.config.set(
            {
                "codec_pipeline.path": PIPELINES[library],
                "codec_pipeline.strict": True,
                "array.write_empty_chunks": True,
            }
        )
        opener = open_zarr
    for path in sorted(entry.parent for entry in folder.glob("*/zarr.json")):
        bits = np.dtype(json.loads((path / "zarr.json").read_bytes())["attributes"]["bits"])
        array = opener(path)
        if task == "write":
            values = np.load(folder / f"{path.name}.in.npy")
            if library == "tensorstore":
                array[...] = values.view(array.dtype.numpy_dtype)
            else:
                array[...] = values
            continue
        for name, selection in (("npy", slice(None)), ("rows.npy", ROWS)):
            found = array[selection]
            if library == "tensorstore":
                found = found.read().result()
            np.save(folder / f"{path.name}.{name}", np.ascontiguousarray(found).view(bits))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
