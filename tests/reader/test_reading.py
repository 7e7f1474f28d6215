"""A filled batch holds what ``dataset.read`` gives, whatever the pieces, the types, the mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsloader.store.dataset import Dataset
from tests.reader.making import (
    ROWS,
    assert_filled,
    every_type,
    make_client,
    make_dataset,
    poison,
    random_request,
    request_of,
)

WAYS: list[dict[str, Any]] = [
    {"mode": "mmap"},
    {"mode": "mmap", "drop_pages": True},
    {"mode": "pread", "drop_pages": True},
    {"mode": "direct"},
    {"in_process": True},
    {"in_process": True, "mode": "direct"},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_every_type_and_mode(typed: Dataset, way: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    with make_client(typed, **way) as client:
        poison(client)
        requests = [random_request(rng, typed) for _ in range(12)]
        for key, request in enumerate(requests[:4]):
            assert client.submit(key, request)
        for key, request in enumerate(requests):
            assert_filled(typed, request, client.wait(key, 20))
            client.done(key)
            if key + 4 < len(requests):
                assert client.submit(key + 4, requests[key + 4])
        assert client.stats()["bad_samples"] == 0


def test_stored_bytes_of_codec_none(tmp_path: Path) -> None:
    with make_dataset(tmp_path / "data.hs", every_type(), samples=6, codec="none") as dataset:
        for mode in ("mmap", "direct"):
            with make_client(dataset, mode=mode) as client:
                request = random_request(np.random.default_rng(2), dataset)
                client.submit(0, request)
                assert_filled(dataset, request, client.wait(0, 20))


def test_any_pieces(usual: Dataset) -> None:
    with make_client(usual) as client:
        poison(client)

        @settings(max_examples=60)
        @given(st.data())
        def check(data: st.DataObject) -> None:
            request = request_of(data.draw(st.permutations(draw_pieces(data, usual))), len(usual.fields))
            assert client.submit(0, request)
            try:
                assert_filled(usual, request, client.wait(0, 20))
            finally:
                client.done(0)

        check()


def draw_pieces(data: st.DataObject, dataset: Dataset) -> list[tuple[int, int, int, int, int]]:
    """Up to six pieces a field, with gaps, empty ones among them."""
    pieces = []
    for field in range(len(dataset.fields)):
        at = 0
        for _ in range(data.draw(st.integers(0, 6))):
            sample = data.draw(st.integers(0, len(dataset) - 1))
            start = data.draw(st.integers(0, int(dataset.lengths[sample])))
            stop = data.draw(st.integers(start, int(dataset.lengths[sample])))
            at += data.draw(st.integers(0, 3))
            if at + stop - start > ROWS:
                break
            pieces.append((field, sample, start, stop, at))
            at += stop - start
    return pieces


def test_a_field_may_be_absent_from_a_batch(usual: Dataset) -> None:
    with make_client(usual) as client:
        request = request_of([(2, 0, 0, 5, 0)], 4)
        request = type(request)((0, 0, 7, 0), request.pieces)
        client.submit(0, request)
        filled = client.wait(0, 20)
        assert filled is not None
        assert [len(span) for span in filled.spans] == [0, 0, 7, 0]
        assert filled.spans[0].shape == (0, 3, 64)
        np.testing.assert_array_equal(filled.spans[2][:5], usual.read(0, "input_ids", 0, 5))


def test_an_empty_batch_is_zeros(usual: Dataset) -> None:
    with make_client(usual) as client:
        poison(client)
        client.submit(0, request_of([], 4))
        filled = client.wait(0, 20)
        assert filled is not None
        assert not any(span.any() for span in filled.spans)


def test_more_pieces_than_foreseen(usual: Dataset) -> None:
    """Batches with more pieces than an area holds get a larger one; later ones of the slot are not confused by it."""
    pieces = [(2, i % 40, 0, 1, i) for i in range(3000)]
    with make_client(usual, slots=3, rows=3000) as client:
        for key in range(9):
            request = request_of(pieces[: (3000, 10, 2000)[key // 3]], 4, 3000)
            assert client.submit(key, request)
            assert_filled(usual, request, client.wait(key, 20))
            client.done(key)


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        ((9, 0, 0, 1, 0), "there are 4 fields"),
        ((0, 40, 0, 1, 0), "there are 40 samples"),
        ((0, -1, 0, 1, 0), "there are 40 samples"),
        ((0, 0, -1, 1, 0), "rows outside the sample"),
        ((0, 0, 0, 10_000, 0), "rows outside the sample"),
        ((0, 0, 0, 2, ROWS - 1), "rows outside its span"),
        ((0, 0, 3, 2, 0), "stop lies before start"),
    ],
)
def test_a_piece_that_cannot_be(usual: Dataset, piece: tuple[int, int, int, int, int], words: str) -> None:
    with make_client(usual, in_process=True) as client:
        with pytest.raises(ValueError, match=words):
            client.submit(0, request_of([piece], 4))
        assert 0 not in client
        assert client.free == client.slots


def test_pieces_that_share_rows(usual: Dataset) -> None:
    with make_client(usual, in_process=True) as client, pytest.raises(ValueError, match="share rows"):
        client.submit(0, request_of([(1, 0, 0, 5, 10), (1, 1, 0, 5, 14)], 4))


def test_a_batch_larger_than_a_slot(usual: Dataset) -> None:
    with make_client(usual, in_process=True) as client, pytest.raises(ValueError, match="at most"):
        client.submit(0, request_of([], 4, ROWS * 2))
