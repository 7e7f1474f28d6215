"""Filters: the same answer as reading every mask, with as few masks read as possible."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsloader.errors import IncompatibleError
from hsloader.order.selection import Columns, Filters, chosen, select

masks_of = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=12)


def columns(masks: list[list[bool]]) -> Columns:
    return Columns(
        lengths=np.array([len(m) for m in masks], dtype=np.int64),
        loss_tokens=np.array([sum(m) for m in masks], dtype=np.int64),
        first_supervised=np.array([m.index(True) if any(m) else -1 for m in masks], dtype=np.int64),
    )


@settings(max_examples=150, deadline=None)
@given(
    masks_of, st.none() | st.integers(1, 10), st.integers(0, 5), st.booleans(), st.sampled_from(["truncate", "drop"])
)
def test_select_agrees_with_the_masks(
    masks: list[list[bool]], max_length: int | None, least: int, neighbours: bool, long: str
) -> None:
    asked: list[int] = []

    def reader(samples: np.ndarray) -> list[np.ndarray]:
        asked.extend(samples.tolist())
        return [np.array(masks[i], dtype=np.uint8) for i in samples]

    filters = Filters(max_length=max_length, long=long, min_loss_tokens=least, neighbours=neighbours)
    selection = select(np.arange(len(masks)), columns(masks), filters, reader)
    expected = []
    for i, mask in enumerate(masks):
        cut = mask[:max_length]
        if max_length is not None and long == "drop" and len(mask) > max_length:
            continue
        if sum(cut) >= least and (not neighbours or any(a and b for a, b in pairwise(cut))):
            expected.append(i)
    assert selection.indices.tolist() == expected
    assert len(asked) == len(set(asked))
    if not neighbours:  # then only a cut can leave the column's count open
        assert all(max_length is not None and len(masks[i]) > max_length for i in asked)


def test_what_the_filters_did_is_told_in_numbers() -> None:
    cols = columns([[True] * 3, [False] * 9 + [True], [True] * 8, [False] * 4])
    selection = select(np.arange(4), cols, Filters(max_length=5, min_loss_tokens=2))
    assert selection.indices.tolist() == [0, 2]
    assert selection.describe() == (
        "4 samples -> 2: 2 cut to 5 tokens (8 tokens less); 2 with fewer than 2 supervised tokens left out"
    )
    dropped = select(np.arange(4), cols, Filters(max_length=5, long="drop"))
    assert dropped.describe() == "4 samples -> 2: 2 longer than 5 tokens left out"
    assert select(np.array([2, 0]), cols, Filters()).describe() == "2 samples"


def test_counting_needs_masks() -> None:
    without = Columns(lengths=np.array([4]), loss_tokens=np.array([-1]), first_supervised=np.array([-1]))
    with pytest.raises(IncompatibleError, match="loss_mask, which this dataset does not have"):
        select(np.arange(1), without, Filters(min_loss_tokens=1))
    cut = columns([[True, False, False, True]])
    with pytest.raises(ValueError, match="masks of 1 samples must be read"):
        select(np.arange(1), cut, Filters(max_length=3, min_loss_tokens=2))


def test_explicit_samples_are_checked() -> None:
    assert chosen([3, 1], 5).tolist() == [3, 1]
    for bad, message in [
        ([], "non-empty"),
        ([1.5], "non-empty list of sample indices"),
        ([5], "5 is outside the dataset's 5 samples"),
        ([2, 0, 2], "2 is listed twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            chosen(bad, 5)
    for settings_ in ({"max_length": 0}, {"long": "cut"}, {"min_loss_tokens": -1}):
        with pytest.raises(ValueError, match="expected"):
            Filters(**settings_)
