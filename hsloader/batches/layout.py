"""Spans, pieces and layouts: which rows of which sample go where in a batch.  No torch here.

A *span* is one contiguous array of a batch's slot, filled from one field.  Mostly a span is a field, but one field may
feed two spans: with the eagle3 shift, the auxiliary and the last state of a token stand in different rows, and so
does the fp8 scale that both of them share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hsloader.store.fields import Field

__all__ = ["PIECE", "BatchLayout", "Span", "SpanRuns", "pieces_of"]

PIECE = np.dtype([("span", "<i8"), ("sample", "<i8"), ("start", "<i8"), ("stop", "<i8"), ("row", "<i8")])
"""A run of rows: token rows [start, stop) of ``sample`` go to the rows from ``row`` on of span number ``span``."""


@dataclass(frozen=True, slots=True)
class Span:
    """One array of a batch's slot, ``[rows, *field.shape]`` of the field's dtype; its number is its place in a list."""

    name: str
    field: Field


@dataclass(frozen=True, eq=False, slots=True)
class SpanRuns:
    """The rows of one span, sample for sample: int64 arrays of one length; runs of no rows are left out of pieces."""

    samples: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class BatchLayout:
    """What a batch is made of.

    ``samples`` are the dataset indices asked for, in batch order, ``bad`` those of them that are left out.  ``shape``
    holds the batch's leading axes (``(1, T)`` packed, ``(B, N)`` padded, ``()`` for a list of samples).  ``rows`` has
    each span's number of rows, in the trainer's order of spans; ``pieces`` (dtype ``PIECE``) fill some of them and
    all others are zero.  ``host`` has the batch's small arrays that need no data (positions, documents, attention).
    """

    samples: NDArray[np.int64]
    bad: frozenset[int]
    shape: tuple[int, ...]
    rows: dict[str, int]
    pieces: NDArray[np.void]
    host: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """How many of the batch's samples are left out."""
        return sum(sample in self.bad for sample in self.samples.tolist()) if self.bad else 0

    def filled(self, span: int) -> NDArray[np.int64]:
        """Which rows of span number ``span`` hold data: int64 ``[runs, 2]`` of first row and number of rows."""
        mine = self._columns[self._columns[:, 0] == span]
        return np.stack([mine[:, 4], mine[:, 3] - mine[:, 2]], axis=1)

    @property
    def tokens(self) -> int:
        """Rows of the first span that hold data."""
        mine = self._columns[self._columns[:, 0] == 0]
        return int(np.add.reduce(mine[:, 3] - mine[:, 2]))

    @property
    def _columns(self) -> NDArray[np.int64]:
        return self.pieces.view(np.int64).reshape(-1, 5)


def pieces_of(runs: Sequence[SpanRuns]) -> NDArray[np.void]:
    """The pieces of a batch, span after span, in row order within each."""
    # In every step of a training: plain columns, as operations on structured arrays are slow.
    columns = np.empty((sum(len(run.counts) for run in runs), 5), dtype=np.int64)
    end = 0
    for number, run in enumerate(runs):
        part = columns[end : (end := end + len(run.counts))]
        part[:, 0] = number
        part[:, 1] = run.samples
        part[:, 2] = run.starts
        np.add(run.starts, run.counts, out=part[:, 3])
        part[:, 4] = run.rows
    some = columns[:, 3] > columns[:, 2]
    if not np.logical_and.reduce(some):
        columns = columns[some]
    return columns.view(PIECE).reshape(-1)
