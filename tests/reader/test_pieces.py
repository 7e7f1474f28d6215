"""Requests as the feeder gets them: several at once are what each alone would be, and none that cannot be passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsloader.reader.pieces import MOST_REQUESTS, PIECES, BatchRequest, SampleTable, to_wire

LENGTHS = np.array([5, 9, 3, 7])
TABLE = SampleTable(np.array([0, 0, 1, 1]), np.array([0, 8, 0, 4]), LENGTHS)


def request_of(*pieces: tuple[int, int, int, int, int], rows: tuple[int, ...] = (20, 20)) -> BatchRequest:
    return BatchRequest(rows, np.array(list(pieces), PIECES))


@st.composite
def requests(draw: st.DrawFn) -> BatchRequest:
    """Samples one behind the other in each of two fields, some runs empty, in any order."""
    pieces = []
    for field in range(2):
        row = 0
        for sample in draw(st.lists(st.integers(0, 3), max_size=4)):
            start = draw(st.integers(0, int(LENGTHS[sample])))
            stop = draw(st.integers(start, int(LENGTHS[sample])))
            pieces.append((field, sample, start, stop, row))
            row += stop - start + draw(st.integers(0, 2))
    return request_of(*draw(st.permutations(pieces)), rows=(50, 50))


@settings(max_examples=100, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=5))
def test_several_requests_at_once(asked: list[BatchRequest]) -> None:
    together = to_wire(asked, TABLE)
    assert len(together) == len(asked)
    for request, wire in zip(asked, together, strict=True):
        expected = sorted(
            (field, int(TABLE.segment_of[sample]), sample, int(TABLE.first_rows[sample]) + start, stop - start, dest)
            for field, sample, start, stop, dest in request.pieces.tolist()
            if stop > start
        )
        assert sorted(wire.tolist()) == expected
        assert [(field, dest) for field, *_, dest in wire.tolist()] == sorted((f, d) for f, *_, d in expected)


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        ((2, 0, 0, 1, 0), "field 2, sample 0, tokens 0 to 1 at row 0: there are 2 fields"),
        ((-1, 0, 0, 1, 0), "there are 2 fields"),
        ((0, 4, 0, 1, 0), "there are 4 samples"),
        ((0, -1, 0, 1, 0), "there are 4 samples"),
        ((0, 0, 2, 1, 0), "stop lies before start"),
        ((0, 0, 0, 6, 0), "rows outside the sample, which has 5"),
        ((0, 0, -1, 3, 0), "rows outside the sample, which has 5"),
        ((0, 0, 0, 5, 16), "rows outside its span, which has 20"),
        ((0, 0, 0, 5, -1), "rows outside its span, which has 20"),
    ],
)
def test_a_piece_that_cannot_be_is_named_wherever_it_is(piece: tuple[int, int, int, int, int], words: str) -> None:
    good = (1, 1, 0, 9, 0)
    for asked in ([request_of(piece)], [request_of(good), request_of(good, piece)]):
        with pytest.raises(ValueError, match=words):
            to_wire(asked, TABLE)


def test_pieces_of_one_batch_may_not_share_rows_and_those_of_two_may() -> None:
    first, second = (0, 0, 0, 5, 3), (0, 1, 0, 4, 7)
    assert len(to_wire([request_of(first), request_of(second)], TABLE)) == 2
    with pytest.raises(ValueError, match="rows 3 to 8 of field 0 and rows 7 to 11 of field 0"):
        to_wire([request_of((0, 2, 0, 3, 0)), request_of(second, first)], TABLE)


def test_more_requests_than_can_be_told_apart_are_refused() -> None:
    asked = [request_of((0, n % 4, 0, 3, n % 7)) for n in range(MOST_REQUESTS + 1)]
    together = to_wire(asked[:-1], TABLE)
    assert [wire["sample"].tolist() for wire in together] == [[n % 4] for n in range(MOST_REQUESTS)]
    with pytest.raises(ValueError, match="65 requests at once; expected at most 64"):
        to_wire(asked, TABLE)
