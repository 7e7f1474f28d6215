"""safetensors headers: what the library writes is read, what it would refuse (and more) is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsloader.errors import SourceError
from hsloader.formats.container import read_container
from hsloader.formats.opening import open_container
from hsloader.formats.reading import BlockReader, RowBuffer, read_rows
from hsloader.formats.writing import safetensors_bytes, safetensors_metadata
from hsloader.store.dtypes import DTYPES


def _file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _value(path: Path) -> Any:
    with open_container(str(path), path.name) as (container, _):
        return container.value


def test_every_dtype_both_ways(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    names = [n for n in DTYPES if n != "bfloat16" and not n.startswith("float8")]
    arrays = {n: np.arange(12).reshape(3, 4).astype(n) for n in names}
    path = tmp_path / "a.safetensors"
    library.save_file(arrays, path, metadata={"made": "by the library"})
    tensors = _value(path)
    assert tensors.pop("__metadata__") == {"made": "by the library"}
    assert {n: (t.dtype, t.shape) for n, t in tensors.items()} == {n: (n, (3, 4)) for n in names}
    import os

    fd = os.open(path, os.O_RDONLY)
    reader = BlockReader(fd, "a")
    for name, tensor in tensors.items():
        (rows,) = read_rows(reader, [tensor], 1, 3, RowBuffer())
        np.testing.assert_array_equal(rows, arrays[name][1:3].view(rows.dtype))
    reader.close()
    again = library.load(safetensors_bytes({n: (n, a) for n, a in arrays.items()}))
    for name in names:
        np.testing.assert_array_equal(again[name], arrays[name])


@pytest.mark.parametrize("said", [None, {}, {"format": "pt"}])
def test_metadata_that_says_nothing(tmp_path: Path, said: object) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(_file({"__metadata__": said, "a": _entry("U8", [2], 0, 2)}, bytes(2)))
    assert set(_value(path)) == {"a"}


def test_metadata_both_ways(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"a": ("uint8", np.arange(2, dtype=np.uint8))}, {"model": "é"}))
    assert _value(path)["__metadata__"] == {"model": "é"}
    with library.safe_open(path, "np") as opened:
        assert opened.metadata() == {"model": "é"}
    assert safetensors_metadata({"__metadata__": {"model": 1}}) == {}


_GOOD = {"hidden_states": _entry("BF16", [2, 4, 4], 0, 64)}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (_file(_GOOD, bytes(64), length=2**63), "out of range"),
        (_file(_GOOD, bytes(64), length=10**8 + 1), "out of range"),
        (_file(_GOOD, bytes(64), length=10**6), "truncated"),
        (_file(_GOOD, bytes(64), length=0), "out of range"),
        (_file(_GOOD, bytes(63)), "truncated"),
        (_file(_GOOD, bytes(65)), "trailing bytes"),
        (_file(b"{" + b"\xff" * 30, bytes(64)), "no JSON"),
        (_file(b"[1, 2]", bytes(64)), "not an object"),
        (_file(b'{"a":' + b"[" * 50000 + b"]" * 50000 + b"}"), "nested too deep"),
        (_file(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}'), "appears twice"),
        (_file(b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}'), "appears twice"),
        (_file({"a": _entry("BF16", [2, -4, 4], 0, 64)}, bytes(64)), "no counts"),
        (_file({"a": _entry("BF16", [2, True, 4], 0, 64)}, bytes(64)), "no counts"),
        (_file({"a": _entry("BF16", [2**32, 2**32, 4], 0, 64)}, bytes(64)), "needs"),
        (_file({"a": _entry("BF16", [2**40, 4, 4], 0, 2**45)}, bytes(64)), "truncated"),
        (_file({"a": _entry("C64", [2], 0, 16)}, bytes(16)), "not supported"),
        (_file({"a": 5}), "has no dtype"),
        (_file({"a": _entry("U8", [8], 0, 8), "b": _entry("U8", [8], 4, 12)}, bytes(12)), "overlaps"),
        (_file({"a": _entry("U8", [8], 0, 8), "b": _entry("U8", [8], 0, 8)}, bytes(8)), "overlaps"),
        (_file({"a": _entry("U8", [8], 0, 8), "b": _entry("U8", [8], 9, 17)}, bytes(17)), "hole"),
        (_file({"a": _entry("U8", [8], 8, 0)}, bytes(8)), "needs 8 bytes"),
        (_file({"a": _entry("U8", [1] * 9, 0, 1)}, bytes(1)), "no counts"),
    ],
)
def test_headers_that_lie(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(SourceError) as caught:
        _value(path)
    assert words in caught.value.reason


def test_a_small_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x90\0\0\0\0")
    with pytest.raises(SourceError, match="too small"), path.open("rb") as file:
        read_container(file.fileno(), "a", 5)
