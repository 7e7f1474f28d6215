"""Blosc-1 frames: the plan of a chunk's blocks, the builder that fills a frame from parts, the check of a foreign one.

The format is Blosc's own (c-blosc ``README_CHUNK_FORMAT.rst``), so that every zarr reader decodes the frames: a 16-byte
header, the little-endian start of each block, then for each block its streams, each behind its own length.  In
*split mode* a block is one stream per byte plane, low byte first; a stream as long as its plane is the plane itself.
Blosc's encoder puts all planes into one zstd stream instead, which costs hidden states a tenth of their ratio and half
of the decoding speed: the low plane is noise, and an encoder that looks for matches in it finds none, slowly.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

__all__ = [
    "HEADER",
    "MAX_CHUNK_BYTES",
    "BlockPlan",
    "FrameBuilder",
    "check_blosc_frame",
    "copy_rows",
    "entropy_compressor",
]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]

HEADER = struct.Struct("<BBBBIII")  # format, codec format, flags, typesize, nbytes, blocksize, cbytes
_FORMAT, _ZSTD_FORMAT = 2, 1
_SHUFFLED, _MEMCPYED, _DONT_SPLIT, _ZSTD = 0x01, 0x02, 0x10, 4 << 5

_BLOCK_LIMIT = 512 * 1024
_MIN_PLANE = 128  # Blosc decodes a block as split only if each plane has at least so many bytes
MAX_CHUNK_BYTES = (2**31 - 1 - 255 * 4) // 3  # Blosc's largest block
_SAMPLE = 4096
_SAMPLE_PAYS = _SAMPLE - _SAMPLE // 32


def entropy_compressor() -> zstandard.ZstdCompressor:
    """zstd reduced to its Huffman stage: a 64-entry match table finds runs (padding), and nothing in noise."""
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        chain_log=6,
        search_log=1,
        window_log=17,
        target_length=0,
        write_content_size=1,
        write_checksum=0,
        write_dict_id=0,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _ordinary_compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=3, write_content_size=True, write_checksum=False, write_dict_id=False)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How the ``rows`` x ``width`` words of a chunk are cut into ``blocks`` equal blocks of ``block_bytes``.

    A block is whole rows where a row fits in one (``by_rows``), so that it is filled straight from the parts.
    """

    rows: int
    width: int
    item_size: int
    blocks: int
    by_rows: bool

    @classmethod
    def of(cls, rows: int, width: int, item_size: int) -> BlockPlan:
        """The plan with the largest blocks of at most 512 KiB that divide the chunk exactly.

        A chunk that only divides into crumbs (prime numbers of rows) gets larger blocks instead.
        """
        row_bytes = width * item_size
        if not 0 < rows * row_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"a chunk of {rows} rows of {row_bytes} bytes: expected 1 to {MAX_CHUNK_BYTES} bytes")
        by_rows = row_bytes <= _BLOCK_LIMIT
        units, unit_bytes = (rows, row_bytes) if by_rows else (rows * width, item_size)
        fewest = -(-units * unit_bytes // _BLOCK_LIMIT)
        wanted = (*range(fewest, 4 * fewest), *range(fewest - 1, 0, -1))
        blocks = next(n for n in wanted if units % n == 0)
        return cls(rows, width, item_size, blocks, by_rows)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the decoded chunk."""
        return self.rows * self.width * self.item_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block (Blosc's ``blocksize``)."""
        return self.chunk_bytes // self.blocks

    @property
    def split(self) -> bool:
        """Whether a block is one stream a plane; too small a block is one stream altogether."""
        return self.block_bytes // self.item_size >= _MIN_PLANE

    @property
    def max_frame_bytes(self) -> int:
        """Bytes of the longest frame: the chunk behind a header."""
        return self.chunk_bytes + HEADER.size


class FrameBuilder:
    """Builds the frames of one plan; holds its scratch and compressor, so one a thread."""

    __slots__ = ("_buffer", "_compress", "_gathered", "_joined", "_plan", "_try_all", "_view")

    def __init__(self, plan: BlockPlan, *, entropy_only: bool) -> None:
        self._plan = plan
        self._try_all = not entropy_only
        self._compress = (entropy_compressor() if entropy_only else _ordinary_compressor()).compress
        # Room for every stream stored raw behind its length; such a frame is then replaced by a plain copy.
        streams = plan.blocks * (plan.item_size if plan.split else 1)
        self._buffer: Bytes = np.zeros(plan.max_frame_bytes + 4 * (plan.blocks + streams) + 4, np.uint8)
        self._view = self._buffer.data
        word = np.dtype(f"<u{plan.item_size}")
        self._gathered: Words | None = None if plan.by_rows else np.zeros((plan.rows, plan.width), word)
        self._joined: Bytes | None = None if plan.split else np.zeros(plan.block_bytes, np.uint8)

    @property
    def buffer(self) -> Bytes:
        """Where ``build`` leaves the frame, with at least four bytes of room behind it."""
        return self._buffer

    def build(self, parts: Sequence[Words], rows: int) -> int:
        """Write the frame of ``parts`` (words ``[rows, w_i]``, widths adding up) into ``buffer``; its length.

        Rows from ``rows`` to the chunk's end are zeros.
        """
        plan, buffer = self._plan, self._buffer
        words, filled = parts, rows
        per_block = plan.rows // plan.blocks
        if self._gathered is not None:
            copy_rows(parts, rows, self._gathered)
            words = [self._gathered.reshape(plan.blocks, -1)]
            filled = -(-rows * plan.width * plan.blocks // (plan.rows * plan.width))
            per_block = 1
        position = HEADER.size + 4 * plan.blocks
        starts = []
        for block in range(plan.blocks):
            starts.append(position)
            first = block * per_block
            have = min(max(filled - first, 0), per_block)
            cut = [part[first : first + have] for part in words]
            position = (self._split_block if plan.split else self._whole_block)(cut, have, per_block, position)
        flags = _ZSTD | (_SHUFFLED if plan.item_size > 1 else 0) | (0 if plan.split else _DONT_SPLIT)
        if position >= plan.max_frame_bytes:
            position = plan.max_frame_bytes
            flags |= _MEMCPYED
            chunk = buffer[HEADER.size : position].view(f"<u{plan.item_size}").reshape(plan.rows, plan.width)
            copy_rows(parts, rows, chunk)
        else:
            struct.pack_into(f"<{plan.blocks}I", self._view, HEADER.size, *starts)
        HEADER.pack_into(
            self._view, 0, _FORMAT, _ZSTD_FORMAT, flags, plan.item_size, plan.chunk_bytes, plan.block_bytes, position
        )
        return position

    def _split_block(self, parts: Sequence[Words], have: int, rows: int, position: int) -> int:
        """Write one block's streams at ``position``; the position behind them.

        Each plane is shuffled into the place where it lies if stored raw, and compressed from there.
        """
        plan = self._plan
        size = plan.block_bytes // plan.item_size
        for plane in range(plan.item_size):
            target = self._buffer[position + 4 : position + 4 + size]
            _fill_plane(parts, plane, target.reshape(rows, -1), have)
            worth = self._try_all or have < rows or plane == plan.item_size - 1 or self._sample_pays(target)
            position = self._finish_stream(target, position, worth)
        return position

    def _whole_block(self, parts: Sequence[Words], have: int, rows: int, position: int) -> int:
        """Write one block as one stream of all its planes (blocks too small to be split)."""
        plan = self._plan
        assert self._joined is not None
        planes = self._joined.reshape(plan.item_size, rows, -1)
        for plane in range(plan.item_size):
            _fill_plane(parts, plane, planes[plane], have)
        self._buffer[position + 4 : position + 4 + plan.block_bytes] = self._joined
        return self._finish_stream(self._joined, position, True)

    def _finish_stream(self, raw: Bytes, position: int, worth: bool) -> int:
        """Put the length before the raw stream that lies at ``position + 4``, or compress it if that shrinks it."""
        size = len(raw)
        if worth:
            stream = self._compress(raw.data)
            if len(stream) < size:
                size = len(stream)
                self._buffer[position + 4 : position + 4 + size] = np.frombuffer(stream, np.uint8)
        struct.pack_into("<I", self._view, position, size)
        return position + 4 + size

    def _sample_pays(self, plane: Bytes) -> bool:
        """Whether 4 KiB from the plane's middle lose at least 1/32 of their length."""
        if len(plane) <= _SAMPLE:
            return True
        middle = (len(plane) - _SAMPLE) // 2
        return len(self._compress(plane[middle : middle + _SAMPLE].data)) <= _SAMPLE_PAYS


def copy_rows(parts: Sequence[Words], rows: int, out: Words) -> None:
    """Copy ``parts`` side by side into the first ``rows`` rows of ``out`` and zero the rest."""
    column = 0
    for part in parts:
        out[:rows, column : column + part.shape[1]] = part[:rows]
        column += part.shape[1]
    out[rows:] = 0


def _fill_plane(parts: Sequence[Words], plane: int, out: Bytes, have: int) -> None:
    """Write byte ``plane`` of each word into ``out`` ``[rows, width]``, parts side by side; rows from ``have`` zero."""
    column = 0
    for part in parts:
        target = out[:have, column : column + part.shape[1]]
        # One pass each: numpy vectorises both, and neither makes an array of words.
        if plane == 0:
            np.copyto(target, part, casting="unsafe")
        else:
            np.right_shift(part, 8 * plane, out=target, casting="unsafe")
        column += part.shape[1]
    out[have:] = 0


def check_blosc_frame(frame: memoryview, plan: BlockPlan) -> str | None:
    """What is wrong with a Blosc frame (without its crc) that should decode to ``plan``'s chunk; None if nothing.

    The decoder takes a frame's length, allocations and offsets from the frame itself, so every number is compared
    with what is known before it is let loose on it.  Block sizes other than ours are legal: other writers choose
    theirs.
    """
    if len(frame) < HEADER.size:
        return f"{len(frame)} bytes are shorter than a Blosc header"
    version, codec_version, flags, item_size, chunk_bytes, block_bytes, length = HEADER.unpack_from(frame)
    if (version, item_size, chunk_bytes) != (_FORMAT, plan.item_size, plan.chunk_bytes):
        return (
            f"Blosc header: expected format {_FORMAT}, item size {plan.item_size}, {plan.chunk_bytes} bytes; "
            f"found {version}, {item_size}, {chunk_bytes}"
        )
    if length != len(frame):
        return f"Blosc header: expected a frame of {len(frame)} bytes, found {length}"
    if flags & _MEMCPYED:
        return None if length == chunk_bytes + HEADER.size else f"a stored frame of {length} bytes does not fit"
    if flags & ~(_SHUFFLED | _DONT_SPLIT) != _ZSTD or codec_version != _ZSTD_FORMAT:
        return f"Blosc header: expected zstd and byte shuffle, found flags {flags:#04x} codec format {codec_version}"
    if not 0 < block_bytes <= chunk_bytes:
        return f"Blosc header: a block of {block_bytes} bytes in a chunk of {chunk_bytes}"
    return _check_streams(frame, chunk_bytes, block_bytes, 1 if flags & _DONT_SPLIT else item_size)


def _check_streams(frame: memoryview, chunk_bytes: int, block_bytes: int, planes: int) -> str | None:
    """The same for the block starts and the stream lengths."""
    blocks = -(-chunk_bytes // block_bytes)
    body = HEADER.size + 4 * blocks
    if body > len(frame):
        return f"{blocks} block starts do not fit in a frame of {len(frame)} bytes"
    for block, start in enumerate(struct.unpack_from(f"<{blocks}I", frame, HEADER.size)):
        size = min(block_bytes, chunk_bytes - block * block_bytes)
        streams = planes if size == block_bytes and block_bytes % planes == 0 else 1
        position = start
        for _ in range(streams):
            if not body <= position <= len(frame) - 4:
                return f"block {block}: a stream begins at byte {position} of {len(frame)}"
            (length,) = struct.unpack_from("<I", frame, position)
            position += 4 + length
            if not 0 < length <= size // streams or position > len(frame):
                return f"block {block}: a stream of {length} bytes at byte {position - 4 - length} of {len(frame)}"
    return None
