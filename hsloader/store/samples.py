"""The samples table: one int64 array ``[columns, samples]`` a segment, and the names and extras beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.errors import DamageError

__all__ = [
    "COLUMNS",
    "FLAGS",
    "SAMPLES_LIMIT",
    "check_path_name",
    "check_table",
    "decode_text",
    "encode_texts",
    "mask_counts",
    "sample_key",
    "table_from",
]

# The columns in their order on disk. ``key`` is the unsigned 64-bit key of the sample's name, kept as its int64 bits.
COLUMNS = ("first_row", "length", "loss_tokens", "first_supervised", "key", "flags")

# Bits of the flags column; the manifest lists them.
FLAGS = {"all_zero_states": 1, "trimmed": 2}

# No dataset has more samples or rows than these; a larger number in a file is damage.
SAMPLES_LIMIT = 1 << 40
ROWS_LIMIT = 1 << 48

_DEEPEST = 100

_KEY_SALT = b"hsloader sample name\0"

Table = npt.NDArray[np.int64]


def sample_key(name: str) -> int:
    """The 64-bit key of a sample's name: the first eight bytes of a salted sha256, little endian.

    The split by name hangs on it, so it may never change.
    """
    digest = hashlib.sha256(_KEY_SALT + encode_name(name)).digest()
    return int.from_bytes(digest[:8], "little")


def mask_counts(mask: npt.NDArray[Any], dtype: str) -> tuple[int, int]:
    """Supervised tokens of a loss mask (bits ``[tokens]`` of ``dtype``), and the first of them (-1: there is none).

    A token is supervised where its mask is not zero.
    """
    if dtype == "bfloat16":
        mask = mask & 0x7FFF  # minus zero is zero
    elif dtype.startswith("float8"):
        mask = mask & 0x7F
    supervised = np.flatnonzero(mask)
    return len(supervised), int(supervised[0]) if len(supervised) else -1


def encode_name(name: str) -> bytes:
    """A name's bytes: UTF-8, with the bytes of undecodable file names kept as they were (surrogateescape).

    ``TypeError`` for what is no string, ``ValueError`` for one that would not come back as it was.
    """
    if not isinstance(name, str):
        raise TypeError(f"a sample's name is a string, found {name!r}")
    try:
        data = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        data = b""
    if decode_text(data) != name:
        raise ValueError(f"sample {name!r}: a name is text, or what os.fsdecode makes of a file's name")
    return data


def check_path_name(name: str) -> None:
    """``ValueError`` unless the name is a path below a folder, so that ``export`` can write a file of that name."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
        raise ValueError(f"the sample name {name!r} is no path below a folder (expected for example rows_0/data_1)")


def decode_text(data: bytes) -> str:
    """The name that ``encode_name`` made ``data`` of."""
    return data.decode("utf-8", "surrogateescape")


def encode_extras(extras: dict[str, Any] | None) -> bytes:
    """Small values of a sample as one JSON object; ``ValueError`` for what JSON cannot hold."""
    if extras is None:
        return b"{}"
    if not isinstance(extras, dict):
        raise ValueError(f"extras must be a dict, found {type(extras).__name__}")
    try:
        text = json.dumps(extras, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
        _check_depth(extras, _DEEPEST)
    except RecursionError:
        raise ValueError(f"extras are nested more than {_DEEPEST} deep") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"extras must be values that JSON can hold: {error}") from error
    return text.encode("ascii")


def _check_depth(value: object, left: int) -> None:
    """How deep a reader's parser can go depends on its Python and its stack: stay far from that."""
    if left < 0:
        raise RecursionError
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _check_depth(inner, left - 1)


def encode_texts(texts: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Byte strings as one uint8 array and the int64 end of each."""
    ends = np.cumsum(np.fromiter((len(text) for text in texts), np.int64, len(texts)), dtype=np.int64)
    return np.frombuffer(b"".join(texts), np.uint8), ends


def table_from(rows: Sequence[Sequence[int]]) -> Table:
    """The table ``[columns, samples]`` of the samples' values in column order (the key as its int64 bits)."""
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(COLUMNS))
    return np.ascontiguousarray(table.T)


def check_table(table: Table, rows: int, tokens: int, path: object) -> None:
    """Demand what holds for every sound table of a segment of ``rows`` rows; ``DamageError`` naming ``path``."""
    first, length, loss, supervised = table[0], table[1], table[2], table[3]
    ends = first + length  # may wrap round, where one of them is not even up to `rows`
    sound = (
        bool((length >= 1).all())
        and bool((length <= rows).all())
        and bool((first >= 0).all())
        and bool((first <= rows).all())
        and bool((first[1:] >= ends[:-1]).all())
        and bool((ends <= rows).all())
        and int(length.sum()) == tokens
        and bool((loss >= -1).all())
        and bool((loss <= length).all())
        and bool((supervised >= -1).all())
        and bool((supervised < length).all())
    )
    if not sound:
        raise DamageError(
            f"{path}: the samples table contradicts itself or the manifest "
            f"({table.shape[1]:,} samples, {tokens:,} tokens, {rows:,} rows); restore the file or verify the dataset"
        )
