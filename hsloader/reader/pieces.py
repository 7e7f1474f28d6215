"""What a batch asks of the reader: the rows of its spans and the pieces that fill them.

A *piece* is a run of rows of one sample and field with its place in the batch. Trainers lay a batch out as pieces;
the client turns them into *wire pieces*, which name rows of a segment, so that the feeder needs no samples table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NoReturn

import numpy as np
import numpy.typing as npt

__all__ = [
    "MOST_REQUESTS",
    "PIECES",
    "SPAN_ALIGNMENT",
    "WIRE",
    "BatchRequest",
    "SampleTable",
    "span_offsets",
    "to_wire",
]

# One piece as a trainer lays it out. ``field_index`` counts in the client's fields, ``start`` and ``stop`` are tokens
# of the sample, ``dest_row`` is a row of that field's span.
PIECES = np.dtype([("field_index", "<i8"), ("sample", "<i8"), ("start", "<i8"), ("stop", "<i8"), ("dest_row", "<i8")])

# One piece as the feeder gets it: ``row`` is the first row in the segment's arrays. ``sample`` serves error records.
WIRE = np.dtype(
    [("field", "<i8"), ("segment", "<i8"), ("sample", "<i8"), ("row", "<i8"), ("rows", "<i8"), ("dest", "<i8")]
)

SPAN_ALIGNMENT = 512  # what CUDA's own allocations have; a span of a slot starts at a multiple of it

_FIELD_SHIFT = 48  # more rows than any span has
_BATCH_SHIFT = 57  # more fields than any dataset has, by far
MOST_REQUESTS = 64  # what is left of 63 bits

_all = np.logical_and.reduce  # what ndarray.all does, without its layers of Python

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


def to_wire(requests: Sequence[BatchRequest], table: SampleTable) -> list[Pieces]:
    """Each request's pieces as wire pieces, sorted by (field, dest). ``ValueError`` for a piece that cannot be.

    Empty pieces vanish. Checked: the field, the sample, the rows inside the sample and inside the span, and that no
    two pieces of a field share a row of the span. ``ValueError`` for more than ``MOST_REQUESTS``, too.
    """
    if len(requests) > MOST_REQUESTS:
        raise ValueError(f"{len(requests)} requests at once; expected at most {MOST_REQUESTS}")
    # The trainer's thread pays for this in its steps: few calls of numpy, for all requests at once, and words only for
    # what is wrong.
    sizes = [len(request.pieces) for request in requests]
    pieces = [np.ascontiguousarray(request.pieces).view(np.int64).reshape(-1, 5) for request in requests]
    field, sample, start, stop, dest = np.concatenate(pieces).T
    batch = np.repeat(np.arange(len(requests)), sizes)
    rows = stop - start
    spans = np.array([request.rows for request in requests], np.int64)
    sound = (field.view(np.uint64) < spans.shape[1]) & (sample.view(np.uint64) < len(table.lengths))
    sound &= ((start | dest | rows) >= 0) & (stop <= table.lengths.take(sample, mode="clip"))
    sound &= dest + rows <= spans.ravel().take(batch * spans.shape[1] + field, mode="clip")
    if not _all(sound):
        _refuse(requests, table)
    wire = np.empty((len(rows), 6), np.int64)
    for at, column in enumerate((field, table.segment_of[sample], sample, None, rows, dest)):
        if column is not None:
            wire[:, at] = column
    np.add(table.first_rows[sample], start, out=wire[:, 3])
    if not _all(rows):
        some = rows > 0
        wire, batch = wire[some], batch[some]
        sizes = np.bincount(batch, minlength=len(requests)).tolist()
    # One number orders pieces by batch, field and row, and the end of one may not pass the beginning of the next.
    place = (batch << _BATCH_SHIFT) + (wire[:, 0] << _FIELD_SHIFT) + wire[:, 5]
    if not _all(place[1:] >= (place + wire[:, 4])[:-1]):
        order = np.argsort(place, kind="stable")
        wire, place = wire[order], place[order]
        crossing = place[1:] < (place + wire[:, 4])[:-1]
        if crossing.any():
            at = int(np.argmax(crossing))
            both = " and ".join(f"rows {d} to {d + n} of field {f}" for f, _, _, _, n, d in wire[at : at + 2].tolist())
            raise ValueError(f"two pieces share rows of a span: {both}")
    ends = list(accumulate(sizes, initial=0))
    return [wire[first:end].view(WIRE).reshape(-1) for first, end in pairwise(ends)]


def _refuse(requests: Sequence[BatchRequest], table: SampleTable) -> NoReturn:
    """Say which piece cannot be, and why."""
    for request, piece in chain.from_iterable(((asked, piece) for piece in asked.pieces) for asked in requests):
        field, sample, start, stop, dest = piece.tolist()
        problem = ""
        if not 0 <= field < len(request.rows):
            problem = f"there are {len(request.rows)} fields"
        elif not 0 <= sample < len(table.lengths):
            problem = f"there are {len(table.lengths):,} samples"
        elif stop < start:
            problem = "stop lies before start"
        elif start < 0 or stop > table.lengths[sample]:
            problem = f"rows outside the sample, which has {table.lengths[sample]:,}"
        elif dest < 0 or dest + stop - start > request.rows[field]:
            problem = f"rows outside its span, which has {request.rows[field]:,}"
        if problem:
            break
    words = f"field {field}, sample {sample}, tokens {start} to {stop} at row {dest}"
    raise ValueError(f"a batch's piece cannot be read: {words}: {problem}")
