"""One chunk's way from the source's rows to a frame: checked, made fp8 if asked for, digested, encoded; in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsloader.conversion.checks import ChunkCheck, StateCheck
from hsloader.conversion.digests import rows_digest
from hsloader.conversion.fp8 import Fp8Encoder, Fp8Rows, is_encoded, source_dtype
from hsloader.store.codec import Codec
from hsloader.store.dtypes import dtype_of

__all__ = ["ChunkEncoder", "EncodedChunk", "chunk_memory"]

Bits = np.ndarray[Any, Any]

_NO_FRAME = memoryview(b"")


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """What became of one chunk. Values that are not finite end its way: then there is no frame.

    ``widths``: of the arrays that the digest ran over; ``fp8``: scales and loss, where the field was made fp8.
    ``frame`` and ``fp8.bits`` live until the encoder's next call.
    """

    check: ChunkCheck
    widths: tuple[int, ...] = ()
    digest: int = 0
    frame: memoryview = _NO_FRAME
    fp8: Fp8Rows | None = None


class ChunkEncoder:
    """Encodes chunks of one state field; ``digest`` records what the read-back compares. One a thread."""

    def __init__(self, codec: Codec, *, digest: bool) -> None:
        field = codec.field
        dtype = source_dtype(field)
        self._digest = digest
        self._check = StateCheck(dtype, dtype_of(dtype).bits)
        self._fp8 = Fp8Encoder(field, codec.chunk_rows) if is_encoded(field) else None
        self._encoder = codec.encoder()

    def __call__(self, parts: Sequence[Bits]) -> EncodedChunk:
        """Encode ``parts``: arrays of the source's bits ``[n, w_i]`` that stand side by side."""
        check = self._check(parts)
        if check.first_row >= 0:
            return EncodedChunk(check)
        fp8 = self._fp8(parts) if self._fp8 is not None else None
        if fp8 is not None:
            parts = [fp8.bits]
        digest = rows_digest(parts) if self._digest else 0
        widths = tuple(part.shape[1] for part in parts)
        return EncodedChunk(check, widths, digest, self._encoder.encode(parts), fp8)


def chunk_memory(codec: Codec) -> tuple[int, int]:
    """Bytes of a chunk's rows as they are read, and of what encoding it holds."""
    field = codec.field
    read = codec.chunk_rows * field.width * dtype_of(source_dtype(field)).item_size
    return read, (3 if is_encoded(field) else 2) * codec.chunk_bytes
