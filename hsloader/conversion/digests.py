"""Digests of rows of bits: what the read-back compares with, instead of reading the source a second time.

Two CRCs with different polynomials, 64 bits together, run over the bits as the source's reader handed them out, before
anything of ours shuffled or packed them.  On one core the pair takes 0.06 s a GB; SHA-256 takes 0.6, and reading the
source again costs the disk as much as the conversion did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from crc32c import crc32c

from hsloader.formats.reading import crc32

__all__ = ["columns_digest", "rows_digest"]

Bits = np.ndarray[Any, Any]


def rows_digest(parts: Sequence[Bits]) -> int:
    """The digest of arrays ``[n, w_i]``, one after another."""
    first = second = 0
    for part in parts:
        if not part.size:
            continue
        data = np.ascontiguousarray(part).data.cast("B")
        first = crc32c(data, first)
        second = crc32(data, second)
    return first << 32 | second


def columns_digest(rows: Bits, widths: Sequence[int], scratch: Bits) -> int:
    """The same digest of rows ``[n, sum(widths)]`` that came in arrays of these widths.

    ``scratch`` is memory of at least as many elements as the widest array, same dtype.
    """
    if len(widths) == 1:
        return rows_digest([rows])
    first = second = 0
    start = 0
    for width in widths:
        part = scratch[: len(rows) * width].reshape(len(rows), width)
        np.copyto(part, rows[:, start : start + width])
        data = part.data.cast("B")
        first = crc32c(data, first)
        second = crc32(data, second)
        start += width
    return first << 32 | second
