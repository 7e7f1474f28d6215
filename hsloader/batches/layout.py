"""Spans, pieces and layouts: which rows of which sample go where in a batch.  No torch here.

A *span* is one contiguous array of a batch's slot, filled from one field.  Mostly a span is a field, but one field may
feed two spans: with the eagle3 shift, the auxiliary and the last state of a token stand in different rows, and so
does the fp8 scale that both of them share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hsloader.store.fields import Field

__all__ = ["PIECE", "BatchLayout", "Span", "pieces_of"]

_Numbers = NDArray[np.int64] | int

PIECE = np.dtype([("span", "<i8"), ("sample", "<i8"), ("start", "<i8"), ("stop", "<i8"), ("row", "<i8")])
"""A run of rows: token rows [start, stop) of ``sample`` go to the rows from ``row`` on of span number ``span``."""


@dataclass(frozen=True, slots=True)
class Span:
    """One array of a batch's slot, ``[rows, *field.shape]`` of the field's dtype; its number is its place in a list."""

    name: str
    field: Field


@dataclass(frozen=True, eq=False, slots=True)
class BatchLayout:
    """What a batch is made of.

    ``samples`` are the dataset indices asked for, in batch order, ``bad`` those of them that are left out.  ``rows``
    has each span's number of rows, in the trainer's order of spans, ``shapes`` the shape of its tensor in the batch;
    ``pieces`` (dtype ``PIECE``) fill some of the rows and all others are zero.  ``tokens`` rows of the first span hold
    data.  ``host`` has the batch's small arrays that need no data (positions, documents, attention).
    """

    samples: NDArray[np.int64]
    bad: frozenset[int]
    rows: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    tokens: int
    pieces: NDArray[np.void]
    host: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """How many of the batch's samples are left out."""
        return sum(sample in self.bad for sample in self.samples.tolist()) if self.bad else 0

    def filled(self, span: int) -> NDArray[np.int64]:
        """Which rows of span number ``span`` hold data: int64 ``[runs, 2]`` of first row and number of rows."""
        columns = self.pieces.view(np.int64).reshape(-1, 5)
        mine = columns[columns[:, 0] == span]
        return np.stack([mine[:, 4], mine[:, 3] - mine[:, 2]], axis=1)


def pieces_of(
    spans: NDArray[np.int64],
    samples: NDArray[np.int64],
    *,
    starts: _Numbers,
    counts: _Numbers,
    rows: _Numbers,
) -> NDArray[np.void]:
    """Pieces: in span ``spans`` of each sample ``counts`` token rows from ``starts`` on go to those from ``rows`` on.

    int64 arrays or numbers that broadcast to one shape.  Pieces of no rows are left out.
    """
    # In every step of a training: plain columns, as operations on structured arrays are slow, and few of them.
    columns = np.empty((*np.broadcast_shapes(spans.shape, samples.shape), 5), dtype=np.int64)
    columns[..., 0] = spans
    columns[..., 1] = samples
    columns[..., 2] = starts
    np.add(starts, counts, out=columns[..., 3])
    columns[..., 4] = rows
    pieces = columns.reshape(-1, 5)
    some = pieces[:, 3] > pieces[:, 2]
    if not np.logical_and.reduce(some):
        pieces = pieces[some]
    return pieces.view(PIECE).reshape(-1)
