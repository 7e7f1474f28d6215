"""The codec of one field: rows of bits to a chunk's frame (with its crc32c) and back.

Encoders and decoders hold the GIL only between calls: shuffling (numpy), compression (zstandard), decompression
(numcodecs) and the checksum (crc32c) all release it, so threads encode and decode chunks in parallel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numcodecs.blosc
import numpy as np
from crc32c import crc32c

from hsloader.store.fields import Field
from hsloader.store.frames import BlockPlan, Bytes, FrameBuilder, check_blosc_frame, copy_rows

__all__ = ["CRC_BYTES", "Codec", "Encoder", "FrameError"]

CRC_BYTES = 4

# numcodecs would otherwise decode on the main thread with a pool of its own behind a global lock, whose threads do
# not survive a fork. zarr sets the same switch when it is imported.
numcodecs.blosc.use_threads = False


class FrameError(ValueError):
    """A frame's checksum differs, or its bytes cannot be decoded to the chunk they should hold."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """How ``chunk_rows`` rows of ``field`` become a frame.  Immutable and free of state: share it between threads."""

    field: Field
    chunk_rows: int
    # Bytes of a decoded chunk, and of the longest frame that ``encode`` makes and ``decode`` takes, with its crc32c.
    chunk_bytes: int = dataclasses.field(init=False, repr=False, compare=False)
    max_frame_bytes: int = dataclasses.field(init=False, repr=False, compare=False)
    _plan: BlockPlan = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plan = BlockPlan.of(self.chunk_rows, self.field.width, self.field.type.item_size)
        longest = plan.max_frame_bytes if self.field.codec == "lossless" else plan.chunk_bytes
        object.__setattr__(self, "_plan", plan)
        object.__setattr__(self, "chunk_bytes", plan.chunk_bytes)
        object.__setattr__(self, "max_frame_bytes", longest + CRC_BYTES)

    @property
    def block_bytes(self) -> int:
        """Bytes that are compressed together: the chunk's largest divisor of at most 512 KiB (whole rows)."""
        return self._plan.block_bytes

    def inner_codecs(self) -> list[dict[str, Any]]:
        """The ``codecs`` of the array's ``sharding_indexed`` codec, as zarr v3 metadata."""
        size = self.field.type.item_size
        codecs: list[dict[str, Any]] = [
            {"name": "bytes", "configuration": {"endian": "little"}} if size > 1 else {"name": "bytes"}
        ]
        if self.field.codec == "lossless":
            blosc = {
                "cname": "zstd",
                "clevel": 3,
                "shuffle": "shuffle" if size > 1 else "noshuffle",
                "typesize": size,
                "blocksize": self.block_bytes,
            }
            codecs.append({"name": "blosc", "configuration": blosc})
        codecs.append({"name": "crc32c"})
        return codecs

    def encoder(self) -> Encoder:
        """A new encoder; it holds scratch of about a chunk, so one a thread."""
        return Encoder(self)

    def decode(self, frame: memoryview | Bytes, out: Bytes, verify: bool = True) -> None:
        """Decode ``frame`` (with its trailing crc32c) into ``out``: contiguous ``uint8`` of ``chunk_bytes`` bytes.

        ``verify`` compares the crc32c first.  Either way the numbers in the frame are checked against what this codec
        expects before anything is read through them.  Raises ``FrameError``; ``out`` then holds anything.
        """
        if out.dtype != np.uint8 or out.shape != (self.chunk_bytes,) or not out.flags.c_contiguous:
            raise ValueError(f"out: expected {self.chunk_bytes} contiguous uint8, found {out.dtype} {out.shape}")
        data = self._sized(frame)
        if verify:
            _check_crc(data)
        body = data[:-CRC_BYTES]
        if self.field.codec == "none":
            np.copyto(out, body)
            return
        problem = check_blosc_frame(body.data, self._plan)
        if problem is not None:
            raise FrameError(problem)
        try:
            numcodecs.blosc.decompress(body, out)
        except (RuntimeError, ValueError) as error:
            raise FrameError(f"Blosc cannot decode the frame of {len(body)} bytes: {error}") from None

    def _sized(self, frame: memoryview | Bytes) -> Bytes:
        """``frame`` as a byte array, if its length is one that this codec's frames can have."""
        data = np.frombuffer(frame, np.uint8)
        least = self.max_frame_bytes if self.field.codec == "none" else CRC_BYTES + 1
        if not least <= len(data) <= self.max_frame_bytes:
            raise FrameError(f"a frame of {len(data)} bytes: expected {least} to {self.max_frame_bytes}")
        return data


def _check_crc(data: Bytes) -> None:
    stored = int.from_bytes(data[-CRC_BYTES:].tobytes(), "little")
    found = crc32c(data[:-CRC_BYTES].data)
    if stored != found:
        raise FrameError(f"crc32c of {len(data) - CRC_BYTES} bytes is {found:#010x}, the frame says {stored:#010x}")


class Encoder:
    """Encodes chunks of one codec, one at a time."""

    __slots__ = ("_buffer", "_builder", "_codec", "_rows", "_word")

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._builder: FrameBuilder | None = None
        field = codec.field
        self._word = np.dtype(f"<u{field.type.item_size}")
        if field.codec == "lossless":
            entropy_only = field.type.is_float and not field.is_token_field
            self._builder = FrameBuilder(codec._plan, entropy_only=entropy_only)
            self._buffer = self._builder.buffer
        else:
            self._buffer = np.empty(codec.max_frame_bytes, np.uint8)
        chunk = self._buffer[: codec.chunk_bytes].view(self._word)
        self._rows = chunk.reshape(codec.chunk_rows, field.width)

    def encode(self, parts: Sequence[np.ndarray[Any, Any]]) -> memoryview:
        """The frame of one chunk with its crc32c.

        ``parts``: arrays of the field's bits ``[n, w_i]`` with ``n <= chunk_rows`` and the ``w_i`` adding up to the
        field's width.  Rows may be strided, the inner axis is contiguous.  They are joined along axis 1 and padded with
        zero rows.  The view is valid until the next call.
        """
        rows, words = self._words(parts)
        if self._builder is None:
            copy_rows(words, rows, self._rows)
            length = self._codec.chunk_bytes
        else:
            length = self._builder.build(words, rows)
        crc = crc32c(self._buffer[:length].data)
        self._buffer[length : length + CRC_BYTES] = np.frombuffer(crc.to_bytes(CRC_BYTES, "little"), np.uint8)
        return self._buffer[: length + CRC_BYTES].data

    def _words(self, parts: Sequence[np.ndarray[Any, Any]]) -> tuple[int, list[np.ndarray[Any, Any]]]:
        """The number of rows, and the parts as unsigned words; ``ValueError`` if they do not make up the field."""
        field = self._codec.field
        bits = field.type.bits
        rows = len(parts[0]) if parts else 0
        fits = all(part.ndim == 2 and part.dtype == bits and len(part) == rows for part in parts)
        if not fits or rows > self._codec.chunk_rows or sum(part.shape[1] for part in parts) != field.width:
            found = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts) or "nothing"
            raise ValueError(
                f"field {field.name}: expected {bits} parts [n <= {self._codec.chunk_rows}, widths adding up to "
                f"{field.width}], found {found}"
            )
        return rows, [part.view(self._word) for part in parts]
