"""What a batch asks of the reader: the rows of its spans and the pieces that fill them.

A *piece* is a run of rows of one sample and field with its place in the batch. Trainers lay a batch out as pieces;
the client turns them into *wire pieces*, which name rows of a segment, so that the feeder needs no samples table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PIECES", "SPAN_ALIGNMENT", "WIRE", "BatchRequest", "SampleTable", "span_offsets", "to_wire"]

# One piece as a trainer lays it out. ``field_index`` counts in the client's fields, ``start`` and ``stop`` are tokens
# of the sample, ``dest_row`` is a row of that field's span.
PIECES = np.dtype([("field_index", "<i8"), ("sample", "<i8"), ("start", "<i8"), ("stop", "<i8"), ("dest_row", "<i8")])

# One piece as the feeder gets it: ``row`` is the first row in the segment's arrays. ``sample`` serves error records.
WIRE = np.dtype(
    [
        ("field", "<u4"),
        ("segment", "<u4"),
        ("sample", "<i8"),
        ("row", "<i8"),
        ("rows", "<i8"),
        ("dest", "<i8"),
    ]
)

SPAN_ALIGNMENT = 512  # what CUDA's own allocations have; a span of a slot starts at a multiple of it

Pieces = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One batch: ``rows[f]`` rows of field ``f``'s span (0: the batch has no such field) and its ``PIECES``.

    Rows that no piece covers are zero in the filled batch.
    """

    rows: tuple[int, ...]
    pieces: Pieces


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Where each sample lies: int64 arrays ``segment_of``, ``first_rows`` and ``lengths``, one entry a sample."""

    segment_of: npt.NDArray[np.integer]
    first_rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def span_offsets(rows: Sequence[int], row_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Where the spans of ``rows[f]`` rows of ``row_bytes[f]`` bytes begin in a slot, and the bytes of them all."""
    offsets: list[int] = []
    end = 0
    for count, width in zip(rows, row_bytes, strict=True):
        offsets.append(end)
        end += -(-count * width // SPAN_ALIGNMENT) * SPAN_ALIGNMENT
    return tuple(offsets), end


def to_wire(request: BatchRequest, table: SampleTable) -> Pieces:
    """``request``'s pieces as wire pieces, sorted by (field, dest). ``ValueError`` for a piece that cannot be.

    Empty pieces vanish. Checked: the field, the sample, the rows inside the sample and inside the span, and that no
    two pieces of a field share a row of the span.
    """
    pieces = request.pieces
    counts = pieces["stop"] - pieces["start"]
    if (counts <= 0).any():
        if (counts < 0).any():
            _refuse(pieces, counts < 0, "stop lies before start")
        pieces, counts = pieces[counts > 0], counts[counts > 0]
    field, sample, dest = pieces["field_index"], pieces["sample"], pieces["dest_row"]
    _demand(pieces, (field >= 0) & (field < len(request.rows)), f"there are {len(request.rows)} fields")
    _demand(pieces, (sample >= 0) & (sample < len(table.lengths)), f"there are {len(table.lengths):,} samples")
    _demand(pieces, (pieces["start"] >= 0) & (pieces["stop"] <= table.lengths[sample]), "rows outside the sample")
    spans = np.array(request.rows, np.int64)
    _demand(pieces, (dest >= 0) & (dest + counts <= spans[field]), f"rows outside its span; spans have {request.rows}")
    order = np.lexsort((dest, field))
    wire = np.empty(len(pieces), WIRE)
    wire["field"], wire["sample"], wire["rows"], wire["dest"] = field, sample, counts, dest
    wire["segment"] = table.segment_of[sample]
    wire["row"] = table.first_rows[sample] + pieces["start"]
    wire = wire[order]
    ends = wire["dest"] + wire["rows"]
    crossing = (wire["field"][1:] == wire["field"][:-1]) & (wire["dest"][1:] < ends[:-1])
    if crossing.any():
        at = int(np.argmax(crossing))
        first, second = pieces[order[at]], pieces[order[at + 1]]
        raise ValueError(f"two pieces share rows of a span: {_words(first)} and {_words(second)}")
    return wire


def _demand(pieces: Pieces, sound: npt.NDArray[np.bool_], what: str) -> None:
    if not sound.all():
        _refuse(pieces, ~sound, what)


def _refuse(pieces: Pieces, wrong: npt.NDArray[np.bool_], what: str) -> None:
    raise ValueError(f"a batch's piece cannot be read ({what}): {_words(pieces[int(np.argmax(wrong))])}")


def _words(piece: np.void) -> str:
    return (
        f"field {piece['field_index']}, sample {piece['sample']}, tokens {piece['start']} to {piece['stop']} "
        f"at row {piece['dest_row']}"
    )
