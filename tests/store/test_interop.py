"""Our arrays in zarr-python, zarrs and tensorstore, and theirs in our codec."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsloader.store.codec import Codec
from hsloader.store.dtypes import DTYPES
from hsloader.store.fields import Field
from hsloader.store.shard import ABSENT, ShardWriter, read_index
from hsloader.store.zarr_json import array_document, chunk_name, group_document, json_bytes, plain_document
from tests.store.foreign import ROWS
from tests.store.test_codec import values

CHUNK_ROWS, SHARD_ROWS, TOTAL = 4, 16, 40


def _needs(library: str) -> Any:
    missing = importlib.util.find_spec(library) is None
    reason = f"{library} is not installed: whether it reads and writes our arrays is NOT tested"
    return pytest.param(library, marks=pytest.mark.skipif(missing, reason=reason))


FUSED = ["zarr-fused"] if tuple(int(part) for part in version("zarr").split(".")[:2]) >= (3, 4) else []
LIBRARIES = ["zarr", *FUSED, _needs("zarrs"), _needs("tensorstore")]


def fields() -> list[tuple[str, Field, str]]:
    """Names, fields and what bfloat16 is called: every type, every codec, blocks split and not, one row and many."""
    cases = [(dtype, Field(name="x", dtype=dtype, shape=(200,)), "bfloat16") for dtype in DTYPES]
    for codec in ("lossless", "none"):
        for shape in ((), (3,), (2, 5), (3, 40_000)):
            name = f"bfloat16-{codec}-{'x'.join(map(str, shape))}"
            cases.append((name, Field(name="x", dtype="bfloat16", shape=shape, codec=codec), "bfloat16"))
    cases.append(("as-uint16", Field(name="x", dtype="bfloat16", shape=(200,)), "uint16"))
    cases.append(("ids", Field(name="x", dtype="int32"), "bfloat16"))
    cases.append(("mask", Field(name="x", dtype="uint8"), "bfloat16"))
    return cases


def contents(name: str, field: Field) -> np.ndarray[Any, Any]:
    """The array's bits ``[TOTAL, width]``: states, then special patterns, a chunk of zeros and one of noise."""
    seed = len(name)
    rows = [
        values(field, 16, "states", seed),
        values(field, 12, "special", seed),
        values(field, 8, "zeros"),
        values(field, 4, "noise", seed),
    ]
    return np.concatenate(rows)


def write_document(path: Path, field: Field, bf16_as: str) -> None:
    path.mkdir()
    document = array_document(field, TOTAL, CHUNK_ROWS, SHARD_ROWS, bf16_as=bf16_as)
    document["attributes"]["bits"] = field.type.bits.str
    (path / "zarr.json").write_bytes(json_bytes(document))


def run(task: str, library: str, folder: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.store.foreign", task, library, str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("library", LIBRARIES)
def test_others_read_our_arrays(library: str, tmp_path: Path) -> None:
    for name, field, bf16_as in fields():
        path = tmp_path / name
        write_document(path, field, bf16_as)
        encoder, array = Codec(field, CHUNK_ROWS).encoder(), contents(name, field)
        for number, first in enumerate(range(0, TOTAL, SHARD_ROWS)):
            writer = ShardWriter(path / chunk_name(number, 1 + len(field.shape)), SHARD_ROWS // CHUNK_ROWS)
            for row in range(first, min(first + SHARD_ROWS, TOTAL), CHUNK_ROWS):
                writer.append(encoder.encode([array[row : row + CHUNK_ROWS]]), 64)
            writer.seal(fsync=False)
    run("read", library, tmp_path)
    for name, field, _ in fields():
        array = contents(name, field).reshape(TOTAL, *field.shape)
        assert np.load(tmp_path / f"{name}.npy").tobytes() == array.tobytes(), name
        assert np.load(tmp_path / f"{name}.rows.npy").tobytes() == array[ROWS].tobytes(), name


@pytest.mark.parametrize("library", LIBRARIES)
def test_we_read_their_arrays(library: str, tmp_path: Path) -> None:
    for name, field, bf16_as in fields():
        write_document(tmp_path / name, field, bf16_as)
        np.save(tmp_path / f"{name}.in.npy", contents(name, field).reshape(TOTAL, *field.shape))
    run("write", library, tmp_path)
    for name, field, _ in fields():
        codec, array = Codec(field, CHUNK_ROWS), contents(name, field)
        for number, first in enumerate(range(0, TOTAL, SHARD_ROWS)):
            path = tmp_path / name / chunk_name(number, 1 + len(field.shape))
            if library == "tensorstore" and not path.exists():
                continue  # it does not store a shard that equals the fill value
            fd = os.open(path, os.O_RDONLY)
            try:
                index = read_index(fd, path.stat().st_size, SHARD_ROWS // CHUNK_ROWS)
                for slot, (offset, length) in enumerate(index.tolist()):
                    row = first + slot * CHUNK_ROWS
                    expected = array[row : row + CHUNK_ROWS].tobytes()
                    if offset == ABSENT:
                        assert not any(expected), name
                        continue
                    out = np.empty(codec.chunk_bytes, np.uint8)
                    codec.decode(memoryview(os.pread(fd, length, offset)), out)
                    assert out.tobytes() == (expected or bytes(codec.chunk_bytes)), name
            finally:
                os.close(fd)


@pytest.mark.parametrize("library", LIBRARIES)
def test_others_read_the_plain_arrays(library: str, tmp_path: Path) -> None:
    samples = np.arange(24 * 30, dtype="<i8").reshape(24, 30) - 7
    names = np.frombuffer(b"a/b.pt\xff.ckpt" * 3, np.uint8)
    for name, array in (("samples", samples), ("names", names)):
        (tmp_path / name).mkdir()
        document = plain_document("int64" if array.itemsize == 8 else "uint8", array.shape)
        document["attributes"]["bits"] = array.dtype.str
        (tmp_path / name / "zarr.json").write_bytes(json_bytes(document))
        (tmp_path / name / chunk_name(0, array.ndim)).write_bytes(array.tobytes())
    run("read", library, tmp_path)
    assert np.load(tmp_path / "samples.npy").tobytes() == samples.tobytes()
    assert np.load(tmp_path / "names.npy").tobytes() == names.tobytes()


def test_a_group_lists_its_arrays(tmp_path: Path) -> None:
    import zarr

    (tmp_path / "zarr.json").write_bytes(json_bytes(group_document({"hsloader": {"format": 1}})))
    write_document(tmp_path / "hidden_states", Field(name="x", dtype="bfloat16", shape=(8,)), "bfloat16")
    group = zarr.open_group(tmp_path, mode="r")
    assert group.attrs["hsloader"] == {"format": 1}
    assert sorted(group.array_keys()) == ["hidden_states"]
    array = group["hidden_states"]
    assert isinstance(array, zarr.Array)
    assert (array.shape, array.shards, array.chunks) == ((TOTAL, 8), (SHARD_ROWS, 8), (CHUNK_ROWS, 8))


def test_documents_are_canonical_and_say_what_bits_mean() -> None:
    field = Field(name="x", dtype="float8_e4m3fn", shape=(8,))
    document = array_document(field, 10, 4, 16)
    assert document["attributes"] == {"hsloader": {"dtype": "float8_e4m3fn"}}
    assert array_document(Field(name="x", dtype="int8"), 10, 4, 16)["attributes"] == {}
    text = json_bytes(document)
    assert text == json_bytes(json.loads(text))
    assert text.endswith(b"}\n")
    assert json_bytes({"b": "\udc80", "a": 1}) == b'{\n  "a": 1,\n  "b": "\\udc80"\n}\n'
    with pytest.raises(ValueError, match="whole chunks"):
        array_document(field, 10, 4, 18)
    with pytest.raises(ValueError, match="bf16_as"):
        array_document(field, 10, 4, 16, bf16_as="float16")
    with pytest.raises(ValueError, match="JSON"):
        json_bytes(float("nan"))
