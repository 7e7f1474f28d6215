"""Exact casts of token values: a value that does not fit is an error, never a different value."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hsloader.store.dtypes import dtype_of

__all__ = ["as_numbers", "exact_cast"]

Array = npt.NDArray[Any]


def as_numbers(bits: Array, dtype: str) -> Array:
    """The bits of ``dtype`` as numpy numbers (bfloat16 widened to float32); ``ValueError`` for fp8."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype.startswith("float8"):
        raise ValueError(f"{dtype} values are not token values")
    if dtype == "bool":
        return bits.view(np.uint8)  # a byte that is neither 0 nor 1 must not become True
    return bits


def exact_cast(bits: Array, source: str, target: str, what: str) -> Array:
    """The same values as bits of ``target``; ``ValueError`` names the first value that ``target`` cannot hold."""
    if source == target and source != "bool":
        return bits
    numbers = as_numbers(bits, source)
    kind = dtype_of(target)
    if kind.is_float:
        raise ValueError(f"{what} holds {source} values, which are not cast to {target}")
    fits = _fits(numbers, target)
    if not fits.all():
        value = numbers[~fits].flat[0]
        raise ValueError(_complaint(what, value, source, target))
    return numbers.astype(kind.bits)


def _fits(numbers: Array, target: str) -> npt.NDArray[np.bool_]:
    """Which values are whole and inside the target's range (0 and 1 for bool)."""
    low, high = (0, 1) if target == "bool" else (np.iinfo(target).min, np.iinfo(target).max)
    if numbers.dtype.kind == "f":
        return np.asarray((numbers >= float(low)) & (numbers < float(high) + 1.0) & (np.floor(numbers) == numbers))
    if numbers.dtype.kind == "u":
        return np.asarray(numbers <= np.uint64(high))
    if target == "uint64":
        return np.asarray(numbers >= 0)
    return np.asarray((numbers >= np.int64(low)) & (numbers <= np.int64(high)))


def _complaint(what: str, value: object, source: str, target: str) -> str:
    return f"{what} holds the value {value} ({source}), which {target} cannot hold"
