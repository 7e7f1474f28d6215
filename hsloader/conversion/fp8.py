"""The lossy codec ``fp8``: states as float8_e4m3fn bits with a float32 scale a token and field, as hs-connectors does.

``scale = max(amax / 448, 1e-12)`` over the token's values in the field, ``bits = e4m3fn(value / scale)``, in float32
(hs-connectors 0.9.0, ``fp8_utils.py``).  Restored it is ``bf16(bits) * bf16(scale)``, rounded to bfloat16.

Rounding is done by adding a power of two.  For ``v = |value| / scale`` of exponent e (-6 where e4m3fn is subnormal)
the last bit of ``v + 2**(e + 20)`` in float32 is e4m3fn's last bit, so the processor's own addition rounds to nearest
even, once, and subtracting gives the rounded value for the loss.  Tables of 64 Ki entries were tried and are slower:
numpy widens the indices to 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hsloader.store.fields import TOKEN_ROW_BYTES, Field

__all__ = [
    "Fp8Encoder",
    "Fp8Rows",
    "Loss",
    "LossSum",
    "combined",
    "is_encoded",
    "made_scales",
    "restored_bits",
    "source_dtype",
    "source_row_bytes",
    "with_fp8_states",
]

Bits = np.ndarray[Any, Any]

_STATES = ("hidden_states", "last_hidden_state")
_FP8 = "float8_e4m3fn"
_LARGEST = np.float32(448)
_LEAST_SCALE = np.float32(1e-12)
_SMALLEST_NORMAL = np.float32(2**-6)
_BLOCK = 1 << 17  # elements worked on at once: numpy's own time for a call no longer counts, and the caches still help


@dataclass(frozen=True, slots=True)
class _Source:
    """How a float dtype's magnitude becomes float32: its bits shifted into place, times a power of two."""

    sign_shift: int
    shift: int
    factor: float
    itemsize: int


_SOURCES = {
    "bfloat16": _Source(8, 16, 1.0, 2),
    "float16": _Source(8, 13, 2.0**112, 2),  # float32's exponent is biased by 127, float16's by 15
    "float32": _Source(24, 0, 1.0, 4),
}


def with_fp8_states(fields: Sequence[Field]) -> tuple[Field, ...]:
    """The fields as the codec stores them: states as float8_e4m3fn, their scales behind all others.

    Fields that are fp8 already keep their own scale, float64 stays exact, and so do states so narrow that they would
    turn into token fields.  ``ValueError`` if the name of a scale is taken.
    """
    chosen = [f for f in fields if f.name in _STATES and f.dtype in _SOURCES and f.width > TOKEN_ROW_BYTES]
    taken = {f"{f.name}_scale" for f in chosen} & {f.name for f in fields}
    if taken:
        raise ValueError(
            f"codec fp8 would store scales as {', '.join(sorted(taken))}, and the samples have a field of that name; "
            "choose the codec lossless"
        )
    stored = [
        replace(f, dtype=_FP8, source_dtype=f.dtype, scale=f"{f.name}_scale") if f in chosen else f for f in fields
    ]
    scales = [Field(name=f"{f.name}_scale", dtype="float32", codec=f.codec) for f in chosen]
    return (*stored, *scales)


def is_encoded(field: Field) -> bool:
    """Whether this codec made the field: fp8 bits of what was no fp8 in the source."""
    return field.dtype == _FP8 and field.scale is not None and field.source_dtype in _SOURCES


def made_scales(fields: Collection[Field]) -> set[str]:
    """The scale fields that this codec made, which no source has."""
    return {field.scale for field in fields if field.scale is not None and is_encoded(field)}


def source_dtype(field: Field) -> str:
    """The dtype in which the source's rows of a state field are read."""
    return field.source_dtype if field.source_dtype is not None and is_encoded(field) else field.dtype


def source_row_bytes(fields: Collection[Field]) -> int:
    """Bytes of one token before the codec, in the dtypes that are read."""
    made = made_scales(fields)
    return sum(
        field.width * (_SOURCES[source_dtype(field)].itemsize if is_encoded(field) else field.type.item_size)
        for field in fields
        if field.name not in made
    )


@dataclass(frozen=True, slots=True)
class Loss:
    """Relative errors of a field's tokens: ``|restored - value| / |value|`` (Euclidean norms), largest and mean."""

    max: float
    mean: float


@dataclass(slots=True)
class LossSum:
    """Relative errors of tokens, added up."""

    tokens: int = 0
    max: float = 0.0
    total: float = 0.0

    def add(self, other: LossSum) -> None:
        """Take in other tokens."""
        self.tokens += other.tokens
        self.max = max(self.max, other.max)
        self.total += other.total

    def loss(self) -> Loss:
        """The result, to four digits (further ones depend on the processor)."""
        mean = self.total / self.tokens if self.tokens else 0.0
        return Loss(float(f"{self.max:.4g}"), float(f"{mean:.4g}"))


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Encoded rows: ``bits`` ``[n, width]`` (valid until the encoder's next call), ``scale`` float32 ``[n]``."""

    bits: Bits
    scale: Bits
    loss: LossSum


class Fp8Encoder:
    """Encodes finite rows of one field, up to ``rows`` at a time; holds scratch, so one a thread."""

    def __init__(self, field: Field, rows: int) -> None:
        assert is_encoded(field)
        self._source = _SOURCES[source_dtype(field)]
        self._width = field.width
        self._bits = np.empty((rows, field.width), np.uint8)
        self._per_block = max(1, min(rows, _BLOCK // field.width))
        shape = (self._per_block, field.width)
        self._value, self._power, self._sum = (np.empty(shape, np.float32) for _ in range(3))
        self._least = np.full(shape, _SMALLEST_NORMAL)  # an array: numpy's maximum with a scalar is three times slower
        self._byte = np.empty(shape, np.uint8)

    def __call__(self, parts: Sequence[Bits]) -> Fp8Rows:
        """Encode ``parts``: arrays of the source's bits ``[n, w_i]`` that stand side by side."""
        rows = len(parts[0])
        bits = self._bits[:rows]
        scale = np.empty(rows, np.float32)
        loss = LossSum(tokens=rows)
        for start in range(0, rows, self._per_block):
            block = slice(start, min(start + self._per_block, rows))
            errors = self._block([part[block] for part in parts], bits[block], scale[block])
            loss.max = max(loss.max, float(errors.max()))
            loss.total += float(errors.sum(dtype=np.float64))
        return Fp8Rows(bits, scale, loss)

    def _block(self, parts: Sequence[Bits], bits: Bits, scale: Bits) -> Bits:
        """Encode a few rows into ``bits`` and ``scale``; the relative error of each."""
        count = len(bits)
        value, power, total = self._value[:count], self._power[:count], self._sum[:count]
        self._load(parts, value, bits)
        np.maximum(value.max(axis=1) / _LARGEST, _LEAST_SCALE, out=scale)
        np.divide(value, scale[:, None], out=value)
        np.bitwise_and(value.view(np.uint32), np.uint32(0x7F80_0000), out=power.view(np.uint32))
        np.maximum(power, self._least[:count], out=power)
        magic = self._magic(power, bits, count)
        np.add(value, magic, out=total)
        byte = self._byte[:count]
        np.copyto(byte, total.view(np.uint32), casting="unsafe")
        bits += byte  # the steps above the power of two; the sign in the top bit is untouched by what is below 128
        np.subtract(total, magic, out=total)
        return _errors(value, total, scale)

    def _load(self, parts: Sequence[Bits], value: Bits, bits: Bits) -> None:
        """Magnitudes as float32, and the signs as the top bits."""
        source, column = self._source, 0
        words = value.view(np.uint32)
        for part in parts:
            columns = slice(column, column + part.shape[1])
            unsigned = part.view(f"u{source.itemsize}")
            np.copyto(words[:, columns], unsigned)
            np.right_shift(unsigned, source.sign_shift, out=bits[:, columns], casting="unsafe")
            column = columns.stop
        bits &= 0x80
        words &= np.uint32((1 << (8 * source.itemsize - 1)) - 1)
        if source.shift:
            words <<= np.uint32(source.shift)
        if source.factor != 1.0:
            value *= np.float32(source.factor)

    def _magic(self, power: Bits, bits: Bits, count: int) -> Bits:
        """The powers of two to add; ``bits`` get the code of each value's own power, less the step it stands for."""
        byte = self._byte[:count]
        np.right_shift(power.view(np.uint32), 20, out=byte, casting="unsafe")  # 8 codes a binade, modulo 256
        byte -= _CODE_OF_NORMAL
        bits += byte
        power *= np.float32(2**20)
        return power


# Of the smallest normal number the code is 8, and the sum stands 8 steps above its power: 121 is its exponent's field.
_CODE_OF_NORMAL = np.uint8((121 * 8) % 256)


def _errors(value: Bits, rounded: Bits, scale: Bits) -> Bits:
    """The relative error of each row, for magnitudes and rounded magnitudes in units of ``scale``."""
    # In these units nothing overflows; the scale is rounded to bfloat16 when values are restored.
    rounded *= (_bf16(scale) / scale)[:, None]
    rounded -= value
    error = np.sqrt(np.einsum("ij,ij->i", rounded, rounded))
    norm = np.sqrt(np.einsum("ij,ij->i", value, value))
    found: Bits = np.divide(error, norm, out=np.zeros_like(error), where=norm > 0)
    if not norm.all():  # all zero, or so small beside the least scale that the squares vanish, and the bits did before
        found[norm == 0] = value[norm == 0].any(axis=1)
    return found


def _bf16(values: Bits) -> Bits:
    """float32 rounded to bfloat16, to nearest even, still as float32."""
    words = values.view(np.uint32)
    rounded = (words + np.uint32(0x7FFF) + (words >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF_0000)
    found: Bits = rounded.view(np.float32)
    return found


def _decoded() -> Bits:
    """The values of the 256 codes as float32."""
    values = [
        math.ldexp(code & 7, -9) if code & 0x78 == 0 else math.ldexp(8 + (code & 7), (code >> 3 & 15) - 10)
        for code in range(128)
    ]
    values[127] = math.nan
    return np.array([*values, *(-v for v in values)], np.float32)


_VALUES = _decoded()
_LARGEST_BF16 = np.uint32(0x7F7F_0000).view(np.float32)


def restored_bits(bits: Bits, scale: Bits, dtype: str) -> Bits:
    """Encoded rows ``[n, ...]`` as bits of their source's ``dtype``: the values that a loader restores.

    The largest values of all may come out beyond the range; they are its largest number then.
    """
    scales = _bf16(np.ascontiguousarray(scale)).reshape(-1, *[1] * (bits.ndim - 1))
    with np.errstate(over="ignore"):
        values = _bf16(_VALUES[bits] * scales)
    limit = np.float32(np.finfo(np.float16).max) if dtype == "float16" else _LARGEST_BF16
    values.clip(-limit, limit, out=values)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    words: Bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return words


def combined(losses: Sequence[tuple[int, Mapping[str, Loss]]]) -> dict[str, Loss]:
    """One loss a field for several segments, each with its tokens."""
    sums: dict[str, LossSum] = {}
    for tokens, fields in losses:
        for name, loss in fields.items():
            sums.setdefault(name, LossSum()).add(LossSum(tokens, loss.max, loss.mean * tokens))
    return {name: found.loss() for name, found in sorted(sums.items())}
