"""safetensors headers, checked in full: sizes, duplicate keys, ranges that overlap, leave holes or bytes over.

The file holds a length (u64), a JSON header, and the tensors' bytes, which the header's ranges must cover exactly.
There are no checksums in the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from hsloader.errors import SourceError
from hsloader.formats.blocks import MAX_AXES, Block, Tensor
from hsloader.formats.windows import Window
from hsloader.store.dtypes import dtype_of

__all__ = ["METADATA", "looks_like_safetensors", "read_safetensors"]

METADATA = "__metadata__"  # the header's key for texts that belong to the whole file
_USUAL_METADATA: tuple[object, ...] = (None, {}, {"format": "pt"})  # says nothing of the sample

_MAX_HEADER = 4 << 20
_MAX_TENSORS = 10_000
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
NOTE = "safetensors has no checksums: its bytes are not verified"


def looks_like_safetensors(head: bytes) -> bool:
    """Whether the first bytes are a length and the beginning of JSON."""
    return head[8:9] in (b"{", b"[") and len(head) > 8


def read_safetensors(window: Window, path: str, size: int | None) -> dict[object, object]:
    """The tensors by name, and the header's metadata as it stands, if it says anything, as ``"__metadata__"``.

    ``size`` of the file, or ``None`` while only the beginning of a gzip file is looked at.
    """
    length = int.from_bytes(window.first(8), "little")
    if length > _MAX_HEADER or length < 2:
        raise SourceError(path, f"a safetensors header of {length} bytes (expected 2 to {_MAX_HEADER}): out of range")
    if size is not None and 8 + length > size:
        raise SourceError(path, f"truncated: a safetensors header of {length} bytes in a file of {size}")
    raw = window.first(8 + length)[8:]
    if len(raw) < length:
        raise SourceError(path, f"truncated: a safetensors header of {length} bytes, {len(raw)} are there")
    entries = _header(raw, path)
    tensors: dict[object, object] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        if name == METADATA:
            if entry not in _USUAL_METADATA:
                tensors[name] = entry
            continue
        tensor = _entry(name, entry, 8 + length, path)
        tensors[name] = tensor
        ranges.append((tensor.block.offset, tensor.block.size, name))
    _cover(sorted(ranges), 8 + length, size, path)
    return tensors


def _header(raw: bytes, path: str) -> Mapping[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key appears twice")
        return made

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        what = "nested too deep" if isinstance(error, RecursionError) else str(error)[:120]
        raise SourceError(path, f"the safetensors header is no JSON that can be read: {what}") from None
    if not isinstance(header, dict) or len(header) > _MAX_TENSORS:
        raise SourceError(path, f"the safetensors header is not an object of at most {_MAX_TENSORS} tensors")
    return header


def _entry(name: str, entry: object, base: int, path: str) -> Tensor:
    """The tensor of one header entry."""
    label = f"tensor {name[:60]!r} of the safetensors header"
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise SourceError(path, f"{label} has no dtype, shape and data_offsets")
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise SourceError(path, f"{label} has the dtype {entry['dtype'][:20]!r}, which is not supported")
    shape, offsets = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > MAX_AXES:
        raise SourceError(path, f"{label} has a shape or data_offsets that are no counts (expected integers from 0)")
    begin, end = offsets
    needs = math.prod(shape) * dtype_of(dtype).item_size
    if end < begin or needs != end - begin:
        raise SourceError(
            path, f"{label} has the byte range {begin}:{end}, but its shape {list(shape)} needs {needs} bytes"
        )
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return Tensor(dtype, shape, tuple(strides), 0, Block(name, end - begin, offset=base + begin))


def _counts(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        return None
    return tuple(value)


def _cover(ranges: list[tuple[int, int, str]], start: int, size: int | None, path: str) -> None:
    """Demand that the ranges follow one another from the header's end to the file's end."""
    at = start
    for offset, length, name in ranges:
        if offset != at:
            how = "overlaps the tensor before it" if offset < at else "leaves a hole before it"
            raise SourceError(path, f"tensor {name[:60]!r} of the safetensors header {how} (offset {offset - start})")
        at += length
    if size is not None and at != size:
        how = "truncated: " if size < at else "trailing bytes: "
        raise SourceError(path, f"{how}the safetensors header describes {at} bytes, the file has {size}")
