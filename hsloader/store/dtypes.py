"""The data types a field may have: their name in the manifest, their bits in numpy, their name in zarr.

Values are handled as bits: bfloat16 travels as ``<u2`` and the two fp8 types as ``u1``, since numpy has neither.
zarr registers ``bfloat16`` but not torch's ``float8_e4m3fn``, so fp8 is plain ``uint8`` to other zarr readers and
the manifest says what the bytes mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["DTYPES", "DType", "dtype_of"]


@dataclass(frozen=True, slots=True)
class DType:
    """One data type: ``name`` as in torch, ``bits`` the numpy type that holds its bit patterns."""

    name: str
    bits: np.dtype[np.generic]
    zarr_name: str
    is_float: bool

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return self.bits.itemsize


def _table() -> dict[str, DType]:
    floats = [
        ("float16", "<f2", "float16"),
        ("float32", "<f4", "float32"),
        ("float64", "<f8", "float64"),
        ("bfloat16", "<u2", "bfloat16"),
        ("float8_e4m3fn", "|u1", "uint8"),
        ("float8_e5m2", "|u1", "uint8"),
    ]
    integers = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
    table = {name: DType(name, np.dtype(bits), zarr_name, True) for name, bits, zarr_name in floats}
    for name in integers:
        table[name] = DType(name, np.dtype(name).newbyteorder("<"), name, False)
    return table


DTYPES: dict[str, DType] = _table()


def dtype_of(name: str) -> DType:
    """The data type called ``name``; ``ValueError`` with the names there are if it is none of them."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ValueError(f"unknown data type {name!r}; a field may be one of {', '.join(DTYPES)}") from None
