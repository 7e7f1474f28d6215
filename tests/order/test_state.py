"""States: a trip through JSON, and refusals that name what the state has and what is here."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hsloader.errors import StateError
from hsloader.order.cursor import Cursor
from hsloader.order.sequence import MOST_EPOCHS
from hsloader.order.state import LoaderState, check_position, check_state

CONTRACT = {"trainer": "speculators-0.9", "max_tokens": 8192, "val_ratio": 0.1, "max_length": None}
STATE = LoaderState(segments=2, fingerprint="fp2", seed=0, epoch=3, position=14, contract=dict(CONTRACT))


def check(state: LoaderState, **here: Any) -> None:
    known: dict[str, Any] = {
        "segments": 5,
        "fingerprint_of": lambda n: f"fp{n}",
        "seed": 0,
        "contract": CONTRACT,
        "path": "data.hs",
    }
    check_state(state, **{**known, **here})


def test_a_state_survives_json_and_a_grown_dataset() -> None:
    state = LoaderState.from_json(json.loads(json.dumps(STATE.to_json())))
    assert state == STATE
    check(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: [], "a dict, not list"),
        (lambda s: {**s, "format": 2}, "format 2: this version reads format 1"),
        (lambda s: {k: v for k, v in s.items() if k != "epoch"}, "lacks epoch"),
        (lambda s: {**s, "position": -1}, "position is -1"),
        (lambda s: {**s, "epoch": "3"}, "epoch is '3'"),
        (lambda s: {**s, "epoch": 1 << 23}, "epoch is 8388608, expected at most 8,388,607"),
        (lambda s: {**s, "segments": True}, "segments is True"),
        (lambda s: {**s, "contract": 1}, "a dict as contract"),
    ],
)
def test_what_is_no_state_is_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        LoaderState.from_json(change(STATE.to_json()))


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({"segments": 1}, "dataset of 2 segments, data.hs has 1"),
        ({"fingerprint_of": lambda n: "other"}, "fingerprint fp2, those of data.hs have other"),
        ({"seed": 7}, "seed=0, this loader has seed=7"),
        ({"contract": {**CONTRACT, "max_tokens": 4096}}, "max_tokens=8192, this loader has max_tokens=4096"),
        ({"contract": {**CONTRACT, "max_length": 2048}}, "max_length=None, this loader has max_length=2048"),
        ({"contract": {**CONTRACT, "world_size": 4}}, "world_size=nothing, this loader has world_size=4"),
    ],
)
def test_a_state_of_something_else_is_refused_with_both_values(here: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        check(STATE, **here)


def test_a_trainers_own_order_is_bound_to_its_number_of_ranks() -> None:
    own = {**CONTRACT, "world_size": 4}
    state = LoaderState(segments=1, fingerprint="fp1", seed=0, epoch=0, position=8, contract=own)
    check(state, contract=own)
    with pytest.raises(
        StateError, match=r"world_size=4, this loader has world_size=2.*hsloader's order, which is elastic"
    ):
        check(state, contract={**CONTRACT, "world_size": 2})


def test_a_position_beyond_the_epoch_is_refused() -> None:
    check_position(0, 10, 10)
    with pytest.raises(StateError, match="batch 11 of epoch 0, which has 10"):
        check_position(0, 11, 10)


class TestCursor:
    """Batches an epoch: 7 on 2 ranks, so 3 a rank."""

    def to(self, cursor: Cursor, batches_done: int) -> None:
        for _ in range(2):  # an interrupted call is made again
            cursor.reach(batches_done, 7)

    def test_the_last_batch_ends_the_epoch(self) -> None:
        cursor = Cursor(2)
        assert cursor.state == (0, 0)
        assert cursor.begin() == (0, 0)
        self.to(cursor, 2)
        assert (cursor.state, cursor.running) == ((0, 4), True)
        self.to(cursor, 3)
        assert (cursor.state, cursor.running) == ((1, 0), False)
        assert cursor.begin() == (1, 0)

    def test_a_break_goes_on_with_the_next_epoch_but_its_state_is_mid_epoch(self) -> None:
        cursor = Cursor(2)
        cursor.begin()
        self.to(cursor, 1)
        cursor.end()
        assert cursor.state == (0, 2)
        assert cursor.begin() == (1, 0)
        self.to(cursor, 1)
        assert cursor.begin() == (2, 0)  # a new iter() ends the running one

    def test_an_iteration_that_gave_nothing_does_not_count(self) -> None:
        cursor = Cursor(2)
        assert [cursor.begin(), cursor.begin()] == [(0, 0), (0, 0)]
        cursor.end()
        cursor.load(3, 2)
        assert cursor.begin() == (3, 2)
        cursor.end()
        assert cursor.state == (3, 2)
        assert cursor.set_epoch(3) is None  # still the loaded position
        assert cursor.begin() == (3, 2)

    def test_an_iteration_that_gave_something_counts_also_if_no_position_was_reached(self) -> None:
        cursor = Cursor(2)
        cursor.load(3, 2)
        cursor.begin()
        cursor.end(gave=True)
        assert (cursor.loaded, cursor.upcoming) == (False, (4, 0))

    def test_set_epoch_repeats_and_jumps(self) -> None:
        cursor = Cursor(2)
        assert cursor.set_epoch(4) is None
        assert cursor.begin() == (4, 0)
        assert cursor.set_epoch(4) is None  # while it runs: for the next iter()
        self.to(cursor, 3)
        assert cursor.begin() == (4, 0)
        for epoch in (-1, MOST_EPOCHS):
            with pytest.raises(ValueError, match=r"epochs count from 0, to 8,388,607"):
                cursor.set_epoch(epoch)
        for nonsense in (1.5, "2", None):
            with pytest.raises(TypeError, match="integer"):
                cursor.set_epoch(nonsense)  # type: ignore[arg-type]
        cursor.set_epoch(np.int64(3))
        assert [type(number) for number in cursor.state] == [int, int]  # else it is no JSON

    def test_a_loaded_position_survives_set_epoch_of_its_own_epoch_only(self) -> None:
        cursor = Cursor(2)
        cursor.load(3, 2)
        assert cursor.state == (3, 2)
        assert cursor.set_epoch(3) is None
        assert cursor.begin() == (3, 2)
        self.to(cursor, 2)
        assert cursor.state == (4, 0)
        cursor.load(3, 2)
        assert "drops the loaded position 2 of epoch 3" in str(cursor.set_epoch(5))
        assert cursor.begin() == (5, 0)

    def test_load_is_refused_while_running_only(self) -> None:
        cursor = Cursor(2)
        cursor.begin()
        with pytest.raises(StateError, match="while an iteration runs"):
            cursor.load(0, 2)
        cursor.end()
        cursor.load(0, 2)
        assert cursor.begin() == (0, 2)

    def test_fast_skip_moves_the_upcoming_epoch(self) -> None:
        cursor = Cursor(2)
        cursor.set_epoch(1)
        cursor.skip_to(4)
        assert (cursor.upcoming, cursor.begin()) == ((1, 4), (1, 4))

    def test_nothing_left_for_more_ranks_finishes_the_epoch(self) -> None:
        cursor = Cursor(8)
        cursor.load(2, 4)
        cursor.begin()
        cursor.finish()
        assert (cursor.state, cursor.begin()) == ((3, 0), (3, 0))

    def test_states_of_what_the_loop_has_seen(self) -> None:
        cursor = Cursor(2)
        cursor.load(1, 2)
        cursor.begin()
        self.to(cursor, 2)  # fetched ahead to the end
        assert [cursor.state_after(n, 7) for n in range(3)] == [(1, 2), (1, 4), (2, 0)]
        with pytest.raises(TypeError, match="integer"):
            cursor.state_after(1.5, 7)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="batches_done=3: this iteration of epoch 1 has 2 batches"):
            cursor.state_after(3, 7)
