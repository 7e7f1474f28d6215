"""bfloat16 for zarr-python: the registered name, with the bit patterns (``<u2``) as its numpy type.

numpy has no bfloat16.  A type on top of ``ml_dtypes`` would lose chunks of -0.0 (zarr compares them with the fill
value) and keep zarrs from reading the arrays; bits do neither.  ``torch.from_numpy(array).view(torch.bfloat16)`` makes
a tensor of what zarr reads.

This is the only module of the store that imports zarr; ``zarr_hook`` loads it once zarr is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import zarr.dtype
import zarr.errors
from zarr.dtype import UInt16, data_type_registry

__all__ = ["BFloat16Bits", "register"]

_NAME = "bfloat16"
_NAN, _INFINITY, _SIGN = 0x7FC0, 0x7F80, 0x8000
# What a type raises to say "not mine". It moved from zarr.dtype to zarr.errors, where 3.1 does not have it.
_NotMine: type[ValueError] = getattr(zarr.errors, "DataTypeValidationError", None) or zarr.dtype.DataTypeValidationError
_SPECIAL = {"NaN": _NAN, "Infinity": _INFINITY, "-Infinity": _INFINITY | _SIGN}


@dataclass(frozen=True, kw_only=True)
class BFloat16Bits(UInt16):
    """zarr v3 data type ``bfloat16`` whose elements are ``uint16`` bit patterns.

    It is never inferred from a numpy dtype, so plain ``uint16`` arrays stay what they are:
    ``zarr.create_array(..., dtype=BFloat16Bits())``.  As a fill value an integer is a bit pattern and a float a number.
    """

    _zarr_v3_name = _NAME  # type: ignore[assignment]

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """Never matches: ``uint16`` is zarr's own type."""
        raise _NotMine(f"{dtype}: bfloat16 is asked for by name, never inferred")

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise _NotMine(f"{data!r}: zarr v2 has no bfloat16")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data in (_NAME, {"name": _NAME}):
            return cls()
        raise _NotMine(f"{data!r}: expected {_NAME!r}")

    def to_json(self, zarr_format: int) -> Any:
        """The name, in zarr v3; ``ValueError`` for v2, which has none."""
        if zarr_format != 3:
            raise ValueError(f"zarr v{zarr_format} has no bfloat16")
        return _NAME

    def cast_scalar(self, data: object) -> np.uint16:
        """The bits of a scalar: an integer is a bit pattern already, a float is rounded; ``TypeError`` otherwise."""
        if isinstance(data, int | np.integer):
            return np.uint16(data)
        if isinstance(data, float | np.floating):
            return _bits(float(data))
        raise TypeError(f"{data!r} is no scalar of bfloat16: expected bits as an integer, or a float")

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> np.uint16:
        """The bits of a JSON number, ``"NaN"``, ``"Infinity"``, ``"-Infinity"`` or ``"0x7fc1"`` (bits)."""
        if isinstance(data, str):
            if data in _SPECIAL:
                return np.uint16(_SPECIAL[data])
            if len(data) == 6 and data.startswith("0x"):
                return np.uint16(int(data, 16))
        elif isinstance(data, int | float) and not isinstance(data, bool):
            return _bits(float(data))
        raise TypeError(f"{data!r} is not a bfloat16 fill value: expected a number, NaN, Infinity, -Infinity or 0x....")

    def to_json_scalar(self, data: object, *, zarr_format: int) -> Any:
        """The inverse of ``from_json_scalar``; a NaN with a payload becomes its bits in hex."""
        bits = int(self.cast_scalar(data))
        for name, special in _SPECIAL.items():
            if bits == special:
                return name
        if bits & ~_SIGN > _INFINITY:
            return f"0x{bits:04x}"
        return float(np.uint32(bits << 16).view(np.float32))


def _bits(value: float) -> np.uint16:
    """``value`` rounded to the nearest bfloat16 (ties to even), as bits; NaN is the canonical one."""
    if math.isnan(value):
        return np.uint16(_NAN)
    with np.errstate(over="ignore"):
        word = int(np.float32(value).view(np.uint32))
    return np.uint16((word + 0x7FFF + (word >> 16 & 1)) >> 16)


def register() -> None:
    """Register the type with zarr unless another class holds the name."""
    if _holder() is None:
        data_type_registry.register(_NAME, BFloat16Bits)


def _holder() -> Any:
    return data_type_registry.contents.get(_NAME)


# zarr registers whatever its entry point finds under this name, so the name yields to a bfloat16 of zarr's own.
if _holder() is not None:
    BFloat16Bits = _holder()  # type: ignore[misc]
