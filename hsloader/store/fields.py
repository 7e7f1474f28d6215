"""Field: one named per-token array of a dataset."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hsloader.store.dtypes import DType, dtype_of

__all__ = ["CODECS", "TOKEN_ROW_BYTES", "Field", "check_field_set"]

# A field whose row (one token) has at most this many bytes is a *token field* (ids, masks, positions, scales): its
# chunks hold thousands of rows and run across samples, where a state field's chunks begin with their sample.
TOKEN_ROW_BYTES = 64

CODECS = ("lossless", "none")

_AXES_LIMIT = 16
_ROW_BYTES_LIMIT = 1 << 29  # a row fits a chunk, and Blosc takes chunks of 682 MiB
_FIELDS_LIMIT = 256

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_RESERVED = frozenset({"samples", "names", "names_end", "extras", "extras_end"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One named per-token array: stored as ``[rows, *shape]`` of ``dtype``.

    ``source_dtype`` is what the producer's file had (``export`` writes it back), ``scale`` names the field that
    holds the scales of an fp8 field.  ``codec`` is ``"lossless"`` or ``"none"``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    codec: str = "lossless"
    source_dtype: str | None = None
    scale: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.match(self.name) or self.name in _RESERVED:
            raise ValueError(
                f"field name {self.name!r}: expected [a-z][a-z0-9_]*, at most 64 characters, "
                f"and none of {', '.join(sorted(_RESERVED))}"
            )
        if self.codec not in CODECS:
            raise ValueError(f"field {self.name}: codec {self.codec!r}; expected one of {', '.join(CODECS)}")
        dtype_of(self.dtype)
        object.__setattr__(self, "shape", tuple(operator.index(n) for n in self.shape))  # numpy's integers are no JSON
        if any(n < 1 for n in self.shape):
            raise ValueError(f"field {self.name}: per-token shape {list(self.shape)} has an axis below 1")
        if len(self.shape) > _AXES_LIMIT:
            raise ValueError(f"field {self.name}: {len(self.shape)} axes a token; expected at most {_AXES_LIMIT}")
        if self.row_bytes > _ROW_BYTES_LIMIT:
            raise ValueError(
                f"field {self.name}: {self.row_bytes:,} bytes a token (shape {list(self.shape)}); "
                f"expected at most {_ROW_BYTES_LIMIT:,}"
            )

    @property
    def type(self) -> DType:
        """The data type's description."""
        return dtype_of(self.dtype)

    @property
    def width(self) -> int:
        """Elements of one row (one token)."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (one token)."""
        return self.width * self.type.item_size

    @property
    def is_token_field(self) -> bool:
        """Whether its chunks run across samples (see ``TOKEN_ROW_BYTES``)."""
        return self.row_bytes <= TOKEN_ROW_BYTES


def check_field_set(fields: Sequence[Field]) -> None:
    """``ValueError`` unless ``fields`` can be those of one dataset: 1 to 256, each name once."""
    if not 1 <= len(fields) <= _FIELDS_LIMIT:
        raise ValueError(f"{len(fields)} fields; expected 1 to {_FIELDS_LIMIT}")
    names = [field.name for field in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"fields: {', '.join(twice)} occurs twice")
