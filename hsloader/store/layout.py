"""Where rows go: the alignment of samples, the rows of a chunk, the chunks of a shard.

Samples follow one another along the row axis. Each starts at a multiple of ``alignment`` rows, and the rows up to the
next start are zero. So a sample is whole chunks of every state field: no chunk is decoded for two samples, and a chunk
decodes straight into its place in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hsloader.store.fields import Field

__all__ = ["SHARD_BYTES", "TOKEN_CHUNK_ROWS", "RowLayout", "choose_layout"]

TOKEN_CHUNK_ROWS = 16384
SHARD_BYTES = 1 << 30

# An index has a slot for every chunk that its shard could hold. A token field has few chunks in a segment, and its
# index should not outweigh them: 1,024 slots are 16 KiB and 16.8 million tokens.
_TOKEN_SHARD_CHUNKS = 1024

_SMALLEST_CHUNK = 128 << 10
_LARGEST_CHUNK = 3 << 20
_LARGEST_ALIGNMENT = 2 << 20

# From this mean encoded size on, a sample begins on a page (an O_DIRECT or mapped read then touches no page twice);
# below it padding to pages would cost more than a few percent of the file.
_PAGE_ALIGNED_FROM = 256 << 10
_PAGE = 4096
_CACHE_LINE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """The row layout of one segment.

    ``alignment``: samples start at its multiples (rows, a power of two).  ``chunk_rows``: rows of a chunk of every
    field; a state field's divides ``alignment``.  ``shard_bytes``: raw bytes that a shard holds at most.
    ``typical_length``: the median number of tokens that the layout was made for.
    """

    alignment: int
    chunk_rows: Mapping[str, int]
    shard_bytes: int = SHARD_BYTES
    typical_length: int = 1

    def shard_chunks(self, field: Field) -> int:
        """Chunks of one shard of ``field``: as many as fit ``shard_bytes``, at least one."""
        chunks = max(1, self.shard_bytes // (self.chunk_rows[field.name] * field.row_bytes))
        return min(chunks, _TOKEN_SHARD_CHUNKS) if field.is_token_field else chunks

    def padded(self, length: int) -> int:
        """Rows that a sample of ``length`` tokens takes, with the zero rows behind it."""
        return -(-length // self.alignment) * self.alignment


def choose_layout(
    fields: Sequence[Field],
    typical_length: int,
    *,
    shard_bytes: int = SHARD_BYTES,
    token_chunk_rows: int = TOKEN_CHUNK_ROWS,
) -> RowLayout:
    """The layout for ``fields`` and samples of about ``typical_length`` tokens (the median, at least 1).

    The alignment is the largest power of two that is at most max(typical length / 4, 128 KiB / widest row) and at
    most 2 MiB / narrowest state row; a state field's chunk is the largest power of two of at most that many rows and
    3 MiB.
    """
    if typical_length < 1:
        raise ValueError(
            f"typical_length is {typical_length}; expected the usual number of tokens of a sample, at least 1"
        )
    rows = [field.row_bytes for field in fields if not field.is_token_field]
    alignment = 1
    if rows:
        wanted = max(typical_length / 4, _SMALLEST_CHUNK / max(rows))
        alignment = _power_of_two_up_to(min(wanted, _LARGEST_ALIGNMENT / min(rows)))
    chunk_rows = {
        field.name: (
            token_chunk_rows
            if field.is_token_field
            else min(alignment, _power_of_two_up_to(_LARGEST_CHUNK / field.row_bytes))
        )
        for field in fields
    }
    return RowLayout(alignment=alignment, chunk_rows=chunk_rows, shard_bytes=shard_bytes, typical_length=typical_length)


def first_chunk_alignment(mean_encoded_sample: float) -> int:
    """Byte alignment of a sample's first chunk in its shard, from the field's mean encoded bytes a sample."""
    return _PAGE if mean_encoded_sample >= _PAGE_ALIGNED_FROM else _CACHE_LINE


def _power_of_two_up_to(limit: float) -> int:
    return 1 << max(0, int(limit).bit_length() - 1)
