"""The ``zarr.json`` documents of a dataset, and canonical JSON bytes.

Written by hand rather than through zarr: the same input must give the same bytes whatever zarr is installed, and the
segment writer must not wait for its import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hsloader.store.codec import Codec
from hsloader.store.fields import Field
from hsloader.store.shard import INDEX_CODECS

__all__ = ["BF16_AS", "array_document", "chunk_name", "group_document", "json_bytes", "plain_document"]

BF16_AS = ("bfloat16", "uint16")

_PLAIN_TYPES = {"int64": 8, "uint8": 1}
# "." keeps all shards of an array in its own directory, where "/" makes one directory an axis and shard.
_CHUNK_KEYS = {"name": "default", "configuration": {"separator": "."}}


def json_bytes(document: object) -> bytes:
    """Canonical JSON: keys sorted, indented by two, ASCII, a newline at the end.  NaN and infinities are refused."""
    return (json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n").encode("ascii")


def chunk_name(number: int, axes: int) -> str:
    """File name of the ``number``-th chunk (shard) along the first of ``axes`` axes: ``c.3.0.0``."""
    return ".".join(["c", str(number), *["0"] * (axes - 1)])


def group_document(attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A group with these attributes."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}


def array_document(
    field: Field, rows: int, chunk_rows: int, shard_rows: int, *, bf16_as: str = "bfloat16"
) -> dict[str, Any]:
    """The sharded array ``[rows, *field.shape]``: shards of ``shard_rows`` rows, chunks of ``chunk_rows``.

    ``bf16_as="uint16"`` names bfloat16 ``uint16``, for readers that do not know the type; the bytes are the same.
    Where zarr's name is not the field's own, ``attributes.hsloader.dtype`` says what the bits mean.
    """
    if bf16_as not in BF16_AS:
        raise ValueError(f"bf16_as: expected one of {', '.join(BF16_AS)}, found {bf16_as!r}")
    if shard_rows % chunk_rows:
        raise ValueError(f"field {field.name}: shards of {shard_rows} rows are not whole chunks of {chunk_rows}")
    data_type = bf16_as if field.dtype == "bfloat16" else field.type.zarr_name
    sharding = {
        "chunk_shape": [chunk_rows, *field.shape],
        "codecs": Codec(field, chunk_rows).inner_codecs(),
        "index_codecs": INDEX_CODECS,
        "index_location": "end",
    }
    return _array(
        [rows, *field.shape],
        [shard_rows, *field.shape],
        data_type,
        [{"name": "sharding_indexed", "configuration": sharding}],
        {} if data_type == field.dtype else {"hsloader": {"dtype": field.dtype}},
    )


def plain_document(data_type: str, shape: Sequence[int]) -> dict[str, Any]:
    """An array of ``int64`` or ``uint8`` in one chunk of plain bytes (file ``chunk_name(0, len(shape))``)."""
    size = _PLAIN_TYPES[data_type]
    codec: dict[str, Any] = {"name": "bytes"}
    if size > 1:
        codec["configuration"] = {"endian": "little"}
    return _array(list(shape), [max(n, 1) for n in shape], data_type, [codec], {})


def _array(
    shape: list[int], chunk: list[int], data_type: str, codecs: list[dict[str, Any]], attributes: dict[str, Any]
) -> dict[str, Any]:
    fill: bool | int | float = 0
    if data_type == "bool":
        fill = False
    elif "float" in data_type:
        fill = 0.0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": _CHUNK_KEYS,
        "fill_value": fill,
        "codecs": codecs,
        "attributes": attributes,
    }
