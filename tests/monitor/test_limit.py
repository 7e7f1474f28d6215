"""The verdict from counters, the statistics, and the lines made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hsloader.monitor.counters import FeederCounter, Stage, TrainerCounter, count_wait, wait_quantile
from hsloader.monitor.header import Snapshot
from hsloader.monitor.limit import Limit, limit_of
from hsloader.monitor.lines import Opening, epoch_text, heartbeat_text, opening_text
from hsloader.monitor.stats import flat_stats
from tests.monitor.making import START, row, snapshot

_S = 10**9
_READY = {"asked": ((11, 0), (12, 0)), "filled": frozenset({11, 12})}


def _ready(seconds: float, counters: dict[TrainerCounter, int]) -> Snapshot:
    return snapshot(seconds, {TrainerCounter.LAST_SERIAL: 10, **counters}, **_READY)


@pytest.mark.parametrize(
    ("after", "limit", "words"),
    [
        pytest.param(
            _ready(10, {TrainerCounter.NEXT_NS: _S // 100, TrainerCounter.LAST_CALL: START + 9 * _S}),
            Limit.TRAINER,
            "the trainer waited for data 0.1 % of the time; 2 of 4 batches in the ring are ready",
            id="trainer",
        ),
        pytest.param(
            _ready(50, {TrainerCounter.LAST_CALL: START + 8 * _S}),
            Limit.TRAINER,
            "the trainer has not asked for a batch for 42 s; 2 are ready",
            id="quiet",
        ),
        pytest.param(
            snapshot(
                10,
                {TrainerCounter.NEXT_NS: 6 * _S},
                threads=(
                    *(row(1, read_ns=9 * _S, read_bytes=1_500_000_000) for _ in range(2)),
                    *(row(2, decode_ns=_S) for _ in range(3)),
                ),
            ),
            Limit.DISK,
            "waited for data 60 % of the time; 2 read threads spent 90 % of it in reads (300 MB/s)",
            id="disk",
        ),
        pytest.param(
            snapshot(
                10,
                {TrainerCounter.NEXT_SINCE: START},
                threads=(row(1, Stage.READ, 0.0), row(1, Stage.READ, 0.0), row(2), row(2), row(2)),
            ),
            Limit.DISK,
            "waited for data 100 % of the time; 2 read threads spent 100 % of it in reads (0 B/s)",
            id="disk-hangs",
        ),
        pytest.param(
            snapshot(
                10,
                {TrainerCounter.NEXT_NS: 3 * _S},
                threads=(
                    *(row(1, read_ns=_S, buffer_ns=8 * _S) for _ in range(2)),
                    *(row(2, decode_ns=10 * _S, decoded_bytes=7_000_000_000) for _ in range(3)),
                ),
            ),
            Limit.DECODE,
            "3 decode threads 100 % in decoding (2.1 GB/s)",
            id="decode",
        ),
        pytest.param(
            _ready(
                10,
                {
                    TrainerCounter.NEXT_NS: 5 * _S,
                    TrainerCounter.TRANSFER_NS: 9 * _S,
                    TrainerCounter.TRANSFER_BYTES: 45 * 10**9,
                },
            ),
            Limit.TRANSFER,
            "copies to the GPU took 90 % of the time, at 5 GB/s",
            id="transfer",
        ),
        pytest.param(
            snapshot(10, {TrainerCounter.NEXT_SINCE: START + 2 * _S, TrainerCounter.SLOTS_BUSY: 4}),
            Limit.RING,
            "all 4 slots hold batches that the script keeps",
            id="ring",
        ),
        pytest.param(
            snapshot(
                10,
                {TrainerCounter.NEXT_SINCE: START},
                {FeederCounter.SEEN_AT: START},
                asked=((11, 0),),
                filled=frozenset(),
            ),
            Limit.FEEDER,
            "the feeder (pid 4711) has not looked at its requests for 10 s",
            id="stopped",
        ),
        pytest.param(
            snapshot(
                10,
                {TrainerCounter.NEXT_SINCE: START},
                {
                    FeederCounter.HELPERS: 4712,
                    FeederCounter.LOOKS: START + 10 * _S,
                    FeederCounter.LOOKS + 1: START + 2 * _S,
                },
                asked=((11, 0),),
                filled=frozenset(),
            ),
            Limit.FEEDER,
            "the feeder's helper (pid 4712) has not looked at its requests for 8.0 s",
            id="helper-stopped",
        ),
        pytest.param(
            snapshot(
                5, {TrainerCounter.RECEIVED: 0, TrainerCounter.STARTED_AT: START + 2 * _S}, {FeederCounter.FILLED: 0}
            ),
            Limit.STARTING,
            "the first batch is being read, 3.0 s so far",
            id="starting",
        ),
        pytest.param(
            snapshot(
                5,
                {TrainerCounter.RECEIVED: 0, TrainerCounter.STARTED_AT: START - 37 * _S},
                {FeederCounter.FILLED: 0, FeederCounter.READY_AT: 0},
            ),
            Limit.STARTING,
            "the feeder is not there yet, 42 s after the loader opened",
            id="no-feeder",
        ),
        pytest.param(
            snapshot(
                5,
                {TrainerCounter.REQUESTED: 0, TrainerCounter.RECEIVED: 0, TrainerCounter.STARTED_AT: START - 37 * _S},
                {FeederCounter.FILLED: 0, FeederCounter.READY_AT: 0},
            ),
            Limit.STARTING,
            "no batch was asked for yet, 42 s after the loader opened",
            id="never-used",
        ),
        pytest.param(
            snapshot(10, {TrainerCounter.NEXT_SINCE: START + 10 * _S - 1_000_000}),
            Limit.TRAINER,
            "the trainer waited for data 0.0 % of the time; 0 of 4",
            id="caught-in-a-short-wait",
        ),
    ],
)
def test_where_the_limit_is(after: Snapshot, limit: Limit, words: str) -> None:
    found = limit_of(snapshot(), after)
    assert found.limit is limit
    assert found.sentence.startswith(f"{limit}: ")
    assert words in found.sentence


def _waits(*milliseconds: float) -> dict[TrainerCounter, int]:
    """The counters of so many ``next()``, the first of which began the iteration."""
    counters = [0] * 64
    for spent in milliseconds:
        count_wait(counters, int(spent * 1e6))
    found = {place: counters[place] for place in range(TrainerCounter.WAITS, 64)}
    found |= {TrainerCounter.NEXT_NS: int(sum(milliseconds) * 1e6), TrainerCounter.BATCHES: len(milliseconds)}
    found |= {TrainerCounter.POSITION: len(milliseconds), TrainerCounter.FIRST_NEXT_NS: int(milliseconds[0] * 1e6)}
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("seconds", "waits", "limit", "proof"),
    [
        (
            5.0,
            [330] + 19 * [0.5],
            Limit.TRAINER,
            "the first batch was waited for 0.33 s, and then the trainer waited for data 0.2 % of the time",
        ),
        (1.0, [800], Limit.STARTING, "the first batch was waited for 0.80 s"),
        (
            10.0,
            [330] + 10 * [0.5] + [3000] + 20 * [0.5],
            Limit.STALLED,
            "one batch of 32 was waited for 3.0 s, and else the trainer waited for data 0.2 % of the time",
        ),
        (
            5.0,
            [1] + 10 * [0.5] + [400] + 9 * [0.5],
            Limit.TRAINER,
            "one batch of 21 was waited for 0.40 s, and else the trainer waited for data 0.2 % of the time",
        ),
        (10.0, 20 * [100], Limit.LATENCY, "2 read threads spent 0 % of it in reads"),
        (10.0, [100, 3000, 100], Limit.STALLED, "one batch of 3 was waited for 3.0 s"),
        (10.0, [100, 3000], Limit.LATENCY, "2 read threads"),  # of two, neither is the exception
    ],
    ids=["start", "start-only", "stall", "hiccup", "every-batch", "few", "two"],
)
def test_a_single_wait_is_told_from_a_limit(seconds: float, waits: list[float], limit: Limit, proof: str) -> None:
    found = limit_of(snapshot(), snapshot(seconds, _waits(*waits)))
    assert found.limit is limit
    assert proof in found.sentence
    line = heartbeat_text(snapshot(), snapshot(seconds, _waits(*waits)), found)
    assert f"; {limit}: {proof}" in line
    assert found.advice.startswith("DataLoader(stall_after=1)") == (limit is Limit.STALLED)


def test_a_busy_disk_that_keeps_a_few_batches_waiting_is_no_stall() -> None:
    busy = (*(row(1, read_ns=9 * _S, read_bytes=1_500_000_000) for _ in range(2)), *(row(2) for _ in range(3)))
    assert limit_of(snapshot(), snapshot(10, _waits(100, 3000, 100), threads=busy)).limit is Limit.DISK


def test_the_first_wait_of_an_earlier_interval_is_none_of_this() -> None:
    """A loader that waited for its first batch in the last half minute and for a tenth of this one."""
    before = snapshot(0, _waits(*[900] + 9 * [1]))
    after = snapshot(10, _waits(*[900] + 9 * [1] + 10 * [100]))
    assert limit_of(before, after).limit is Limit.LATENCY
    again = _waits(*[900] + 9 * [1] + 10 * [100])  # a new iteration of three batches, with a wait for its first
    again |= {TrainerCounter.POSITION: 3, TrainerCounter.FIRST_NEXT_NS: 980_000_000}
    found = limit_of(before, snapshot(10, again))
    assert (found.limit, found.proof.partition(",")[0]) == (Limit.TRAINER, "the first batch was waited for 0.98 s")


def test_statistics_over_a_window_and_since_the_start() -> None:
    before = snapshot(0, {TrainerCounter.TOKENS: 1_000, TrainerCounter.BATCHES: 10})
    after = snapshot(
        10,
        {
            TrainerCounter.TOKENS: 3_000,
            TrainerCounter.ROWS: 4_000,
            TrainerCounter.BATCHES: 20,
            TrainerCounter.POSITION: 20,
            TrainerCounter.EPOCH_BATCHES: 50,
            TrainerCounter.NEXT_NS: _S,
        },
    )
    found = flat_stats(after, before)
    assert all(isinstance(value, float) for value in found.values())
    assert found["tokens_per_second"] == 200
    assert found["mean_tokens_per_second"] == pytest.approx(3_000 / 110)
    assert found["padding_share"] == 0.25
    assert found["data_wait_share"] == 0.1
    assert found["eta_seconds"] == 30
    assert set(flat_stats(after)) == set(found)
    # The first next() of a loader: what the client had waited before is no part of it.
    waited = snapshot(0, {TrainerCounter.WAIT_NS: 5 * _S})
    first = snapshot(10, {TrainerCounter.WAIT_NS: 5 * _S, TrainerCounter.NEXT_NS: 2 * _S})
    assert flat_stats(first, waited)["data_wait_share"] == 0.2
    # Every name is documented.
    from hsloader.monitor import stats

    text = stats.__doc__ or ""
    undocumented = {n for n in found if not n.startswith("mean_") and f"``{n}``" not in text}
    assert undocumented <= {
        "samples_per_second", "batches_per_second", "read_bytes_per_second", "decoded_bytes_per_second",
        "index_seconds", "buffer_seconds", "decode_seconds",
    }  # fmt: skip


def test_quantiles_of_waits_are_right_within_their_class() -> None:
    counters = [0] * 64
    for microseconds in [*[3] * 98, 40_000, 5_000_000]:
        count_wait(counters, microseconds * 1000)
    classes = counters[32:]
    assert 2e-6 <= wait_quantile(classes, 0.5) <= 4e-6
    assert 0.032 <= wait_quantile(classes, 0.99) <= 0.066
    assert 4.1 <= wait_quantile(classes, 1.0) <= 8.4
    count_wait(counters, 10**15)
    assert wait_quantile([0] * 32, 0.5) == 0


def test_lines_name_what_matters() -> None:
    opening = Opening(
        dataset="data.hs", samples=10_000, tokens=16_200_000, raw_bytes=924 * 10**9, stored_bytes=626 * 10**9,
        batches=1250, world=8, mode="mmap", reason="a local file system", slots=4, slot_bytes=470_000_000,
    )  # fmt: skip
    text = opening_text(opening)
    assert text.startswith(
        "data.hs: 10,000 samples, 16,200,000 tokens, 924 GB (626 GB on disk); 1,250 batches an epoch"
    )
    assert text.endswith("reads by mmap (a local file system), ring of 4 batches, 1.88 GB")
    worker = opening_text(replace(opening, world=1, batches=3, rank_batches=6))
    assert "on disk); 3 of 6 batches an epoch; reads by" in worker
    part = opening_text(replace(opening, samples=980, raw_bytes=90 * 10**9, whole=False))
    assert "16,200,000 tokens, 90 GB (the whole dataset is 626 GB on disk); 1,250 batches" in part
    after = _ready(
        10,
        {
            TrainerCounter.TOKENS: 400_000,
            TrainerCounter.BATCHES: 50,
            TrainerCounter.POSITION: 50,
            TrainerCounter.EPOCH_BATCHES: 1250,
            TrainerCounter.NEXT_NS: _S // 50,
            TrainerCounter.LAST_CALL: START + 10 * _S,
        },
    )
    beat = heartbeat_text(snapshot(), after, limit_of(snapshot(), after), slowest=(5, 0.07, 8))
    assert "epoch 0, batch 50 of 1,250, 40,000 tokens/s" in beat
    assert "data wait 0.2 %, 2 of 4 in the ring ready, 4 min left; trainer-bound; of 8 ranks" in beat
    assert beat.endswith("of 8 ranks here rank 5 waits most: 7.0 %")
    summary = epoch_text(snapshot(), after, 0).splitlines()
    assert summary[0] == "epoch 0 was left after 50 of 1,250 batches"
    assert any(line.startswith("  limit      trainer-bound: ") for line in summary)
    assert "limit" not in epoch_text(snapshot(), replace(after, at=START + _S // 2), 0)  # too short for a verdict
    whole = _ready(10, {TrainerCounter.BATCHES: 50, TrainerCounter.POSITION: 50, TrainerCounter.EPOCH_BATCHES: 50})
    whole = replace(whole, info={"split": "val"})
    assert epoch_text(snapshot(), whole, 3).startswith("epoch 3 of val is over\n")
    assert any(line.split() == ["batches", "50", "in", "10", "s"] for line in summary)


def test_the_last_wait_is_the_whole_next() -> None:
    """A ``next()`` that waits in slices (to report a stall meanwhile) is told as one; a reader alone counts waits."""
    alone = {TrainerCounter.LAST_WAIT_NS: 8_000_000}
    assert flat_stats(snapshot(10, alone))["data_wait_last_seconds"] == 0.008
    within = {**alone, TrainerCounter.NEXT_NS: 2 * _S, TrainerCounter.LAST_NEXT_NS: _S + _S // 5}
    assert flat_stats(snapshot(10, within))["data_wait_last_seconds"] == 1.2
    counters = [0] * 64
    count_wait(counters, 1_200_000_000)
    assert counters[TrainerCounter.LAST_NEXT_NS] == 1_200_000_000
