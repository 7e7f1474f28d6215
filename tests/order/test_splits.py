"""A sample's side of the split is its own: nothing that happens to other samples moves it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsloader.order.splits import own_split, split_of
from tests.shared_data import SHARED, needs_shared

keys = st.lists(st.integers(0, 2**64 - 1), max_size=60)
ratios = st.floats(0, 1, exclude_max=True)


def sides(values: list[int], ratio: float) -> list[bool]:
    return split_of(np.array(values, dtype=np.uint64), ratio).tolist()


@settings(max_examples=80, deadline=None)
@given(keys, keys, ratios, ratios)
def test_append_and_order_change_nothing_and_a_larger_ratio_only_adds(
    before: list[int], appended: list[int], one: float, other: float
) -> None:
    assert sides(before + appended, one)[: len(before)] == sides(before, one)
    assert sides(before[::-1], one) == sides(before, one)[::-1]
    small, large = sides(before, min(one, other)), sides(before, max(one, other))
    assert all(not a or b for a, b in zip(small, large, strict=True))


def test_the_ratio_is_met_and_the_ends_are_exact() -> None:
    values = np.arange(100_000, dtype=np.uint64)
    assert split_of(values, 0.1).mean() == pytest.approx(0.1, abs=0.005)
    assert not split_of(values, 0.0).any()
    with pytest.raises(ValueError, match=r"val_ratio=1\.0"):
        split_of(values, 1.0)


def test_the_split_is_pinned_because_validation_sets_must_stay_what_they_are() -> None:
    assert sides([0, 1, 2, 3, 2**63, 2**64 - 1], 0.5) == [True, True, False, False, True, False]
    assert np.flatnonzero(split_of(np.arange(20, dtype=np.uint64), 0.25)).tolist() == [0, 1, 7, 9, 10, 14]


@needs_shared
def test_speculators_shuffled_file_split() -> None:
    case = json.loads((SHARED / "golden/cases/speculators-0.4.0/case.json").read_text())["split_files"]
    train, val = own_split("shuffled-files", len(case["listing"]), case["ratio"])
    assert [case["listing"][i] for i in train] == case["train"]
    assert [case["listing"][i] for i in val] == case["val"]


def test_contiguous_split_and_bad_arguments() -> None:
    train, val = own_split("contiguous", 14, 0.7)
    assert (train.tolist(), val.tolist()) == (list(range(9)), list(range(9, 14)))
    with pytest.raises(ValueError, match="expected one of contiguous, shuffled-files"):
        own_split("random", 3, 0.5)
    with pytest.raises(ValueError, match=r"train_ratio=0\.0"):
        own_split("contiguous", 3, 0.0)
