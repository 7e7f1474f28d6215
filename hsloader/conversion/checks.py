"""What is checked of every chunk and every sample while it is converted: finite values, zero states, ids.

States are looked at as integers.  The patterns of NaN and Inf are the largest ones of each sign, so two maxima (of the
bits once as unsigned, once as signed numbers) decide exactly whether there is one, at memory speed and without a
temporary; only then values are counted.  Rows of zeros are looked for among those that begin and end with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["ChunkCheck", "StateCheck", "check_ids"]

Bits = np.ndarray[Any, Any]

# The smallest magnitude pattern that is not finite. float8_e4m3fn has no infinities and one NaN, 0x7f.
_NOT_FINITE = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7C,
}
_NO_INFINITY = frozenset({"float8_e4m3fn"})


@dataclass(frozen=True, slots=True)
class ChunkCheck:
    """What was found in one chunk: values that are not finite, and rows in which every value is +0 or -0."""

    nans: int = 0
    infinities: int = 0
    first_row: int = -1
    zero_rows: int = 0


class StateCheck:
    """Checks the chunks of one state field; holds no state, so threads share it."""

    __slots__ = ("_has_infinity", "_limit", "_sign", "_signed", "_unsigned")

    def __init__(self, dtype: str, bits: np.dtype[Any]) -> None:
        limit = _NOT_FINITE.get(dtype)
        self._limit = limit
        self._unsigned = np.dtype(f"u{bits.itemsize}")
        self._signed = np.dtype(f"i{bits.itemsize}")
        self._sign = 1 << (8 * bits.itemsize - 1)
        self._has_infinity = dtype not in _NO_INFINITY

    def __call__(self, parts: Sequence[Bits]) -> ChunkCheck:
        """Check ``parts``: arrays of bits ``[n, w_i]`` that make up ``n`` rows."""
        if self._limit is None:
            return ChunkCheck()
        nans = infinities = 0
        first = -1
        filled = [part for part in parts if part.size]
        for part in filled:
            unsigned = part.view(self._unsigned)
            if int(part.view(self._signed).max()) >= self._limit or int(unsigned.max()) >= self._sign + self._limit:
                more_nans, more_infinities, row = self._count(unsigned)
                nans += more_nans
                infinities += more_infinities
                first = row if first < 0 else min(first, row)
        return ChunkCheck(nans, infinities, first, self._zero_rows(filled))

    def _zero_rows(self, parts: Sequence[Bits]) -> int:
        """Rows in which every value is +0 or -0."""
        if not parts:
            return 0
        magnitude = self._unsigned.type(self._sign - 1)
        ends = parts[0][:, [0, -1]].view(self._unsigned) & magnitude
        rows = np.flatnonzero(~ends.any(axis=1))
        for part in parts:
            if not len(rows):
                break
            rows = rows[~(part[rows].view(self._unsigned) & magnitude).any(axis=1)]
        return len(rows)

    def _count(self, unsigned: Bits) -> tuple[int, int, int]:
        """NaNs, infinities and the first row with one of them."""
        assert self._limit is not None
        magnitude = unsigned & self._unsigned.type(self._sign - 1)
        bad = magnitude >= self._unsigned.type(self._limit)
        total = int(np.count_nonzero(bad))
        infinities = int(np.count_nonzero(magnitude == self._unsigned.type(self._limit))) if self._has_infinity else 0
        return total - infinities, infinities, int(np.argmax(bad.any(axis=1)))


def check_ids(ids: Bits, vocab_size: int | None) -> str | None:
    """Why these token ids cannot be right, or None."""
    if not len(ids):
        return None
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        where = int(np.argmax(ids < 0))
        return f"input_ids: negative id {low} (first at token {where}); ids are 0 or more"
    if vocab_size is not None and high >= vocab_size:
        where = int(np.argmax(ids >= vocab_size))
        return f"input_ids: id {high} (first at token {where}) is outside the vocabulary of {vocab_size:,}"
    return None
