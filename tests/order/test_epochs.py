"""What a training run relies on in an epoch's order: every sample once, ranks alike, resumable anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsloader.order.mixing import epoch_permutation
from hsloader.order.planning import EpochPlans, Planner, counted_planner, packed_planner
from hsloader.order.sequence import BatchSequence, check_share, share_of, steps_left

BUDGET = 64
PINNED_SHUFFLE = [9, 1, 10, 4, 11, 0, 5, 7, 6, 8, 2, 3]
PINNED_PACKING = [[6, 2], [0, 8, 7], [4, 3], [1], [5]]
samples_and_costs = st.lists(st.integers(0, 2 * BUDGET), min_size=1, max_size=200)
worlds = st.integers(1, 5)


def planners(costs: list[int], seed: int) -> list[Planner]:
    samples = np.arange(len(costs), dtype=np.int64) * 3 + 1
    return [
        counted_planner(samples, 4, seed=seed),
        counted_planner(samples, 3, seed=seed, drop_last=True),
        packed_planner(samples, np.array(costs, dtype=np.int64), BUDGET, seed=seed),
        packed_planner(samples, np.array(costs, dtype=np.int64), BUDGET, seed=seed, shuffle=False),
    ]


def run_of(plan: BatchSequence, position: int, world: int) -> list[list[list[int]]]:
    """What each rank gets, step after step."""
    return [[plan[n].tolist() for n in share_of(len(plan), position, rank, world)] for rank in range(world)]


@settings(max_examples=60, deadline=None)
@given(samples_and_costs, st.integers(0, 5), st.integers(0, 3), worlds)
def test_each_sample_comes_at_most_once_and_ranks_get_equally_many(
    costs: list[int], seed: int, epoch: int, world: int
) -> None:
    for plan in planners(costs, seed):
        ranks = run_of(plan(epoch), 0, world)
        assert {len(batches) for batches in ranks} == {len(plan(epoch)) // world}
        seen = [sample for batches in ranks for batch in batches for sample in batch]
        assert len(seen) == len(set(seen))
        assert set(seen) <= set(plan(epoch).samples.tolist())


@settings(max_examples=60, deadline=None)
@given(samples_and_costs, st.integers(0, 5), worlds, worlds, st.data())
def test_a_run_resumed_anywhere_with_any_number_of_ranks_gives_the_tail_of_the_undisturbed_run(
    costs: list[int], seed: int, world: int, other: int, data: st.DataObject
) -> None:
    for planner in planners(costs, seed):
        plan = planner(1)
        steps = data.draw(st.integers(0, steps_left(len(plan), 0, world)))
        position = steps * world
        resumed = run_of(planner(1), position, other)  # planned afresh, as another process would
        assert len(resumed[0]) == (len(plan) - position) // other
        together = [batch for step in zip(*resumed, strict=True) for batch in step]
        assert together == [batch.tolist() for batch in plan][position : position + len(together)]


@settings(max_examples=60, deadline=None)
@given(samples_and_costs, st.integers(0, 5))
def test_packed_batches_keep_the_budget_the_order_and_every_sample(costs: list[int], seed: int) -> None:
    samples = np.arange(len(costs), dtype=np.int64)
    plan = packed_planner(samples, np.array(costs, dtype=np.int64), BUDGET, seed=seed)(0)
    order = {sample: at for at, sample in enumerate(epoch_permutation(samples, seed, 0).tolist())}
    assert sorted(plan.samples.tolist()) == samples.tolist()
    for batch in plan:
        assert sum(min(max(costs[sample], 1), BUDGET) for sample in batch) <= BUDGET
        assert [order[sample] for sample in batch.tolist()] == sorted(order[sample] for sample in batch.tolist())
    half_empty = [batch for batch in plan if sum(min(max(costs[s], 1), BUDGET) for s in batch) * 2 <= BUDGET]
    assert len(half_empty) <= 1


def test_packing_fills_batches_and_mixes_across_windows() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.8, 0.8, 30_000).astype(np.int64), 1, 8192)
    plan = packed_planner(np.arange(30_000), lengths, 8192, seed=0)(0)
    assert lengths.sum() / (len(plan) * 8192) > 0.995
    # Long and short batches are spread over the epoch, not sorted within it.
    counts = np.array([len(batch) for batch in plan], dtype=float)
    thirds = [part.mean() for part in np.array_split(counts, 3)]
    assert max(thirds) < 1.05 * min(thirds)


def test_epochs_differ_and_the_last_short_batch_follows_drop_last() -> None:
    samples = np.arange(10, dtype=np.int64)
    kept, dropped = counted_planner(samples, 4, seed=3), counted_planner(samples, 4, seed=3, drop_last=True)
    assert [len(batch) for batch in kept(0)] == [4, 4, 2]
    assert [len(batch) for batch in dropped(0)] == [4, 4]
    assert kept(0).samples.tolist() != kept(1).samples.tolist()
    assert kept(0).samples.tolist() != counted_planner(samples, 4, seed=4)(0).samples.tolist()
    assert counted_planner(samples, 4, seed=3, shuffle=False)(7).samples.tolist() == samples.tolist()


def test_the_order_is_pinned_because_saved_states_depend_on_it() -> None:
    assert epoch_permutation(np.arange(12, dtype=np.int64), 0, 0).tolist() == PINNED_SHUFFLE
    plan = packed_planner(np.arange(9), np.array([30, 60, 5, 40, 20, 70, 10, 33, 1]), BUDGET, seed=1)(2)
    assert [batch.tolist() for batch in plan] == PINNED_PACKING


def test_a_subset_is_shuffled_as_the_whole_set_is() -> None:
    whole = epoch_permutation(np.arange(100, dtype=np.int64), 5, 2)
    subset = np.arange(0, 100, 7, dtype=np.int64)
    assert epoch_permutation(subset, 5, 2).tolist() == [sample for sample in whole.tolist() if sample % 7 == 0]


def test_plans_of_few_epochs_are_kept() -> None:
    made: list[int] = []

    def planner(epoch: int) -> BatchSequence:
        made.append(epoch)
        return counted_planner(np.arange(5), 2, seed=0)(epoch)

    plans = EpochPlans(planner)
    assert plans(0) is plans(0)
    plans(1), plans(0), plans(2), plans(1)
    assert made == [0, 1, 2]
    with pytest.raises(ValueError, match="epochs count from 0"):
        plans(-1)


def test_fewer_batches_than_ranks_are_refused_with_the_remedy() -> None:
    check_share(4, 4, split="val", samples=40)
    with pytest.raises(ValueError, match=r"40 samples make 3 batches, fewer than the 4 ranks.*raise val_ratio"):
        check_share(3, 4, split="val", samples=40)
    with pytest.raises(ValueError, match="1 sample makes 1 batch, fewer than the 2 ranks"):
        check_share(1, 2, split="val", samples=1)
    with pytest.raises(ValueError, match="use smaller batches, or fewer ranks"):
        check_share(0, 2, split="train", samples=2)
    with pytest.raises(ValueError, match="2 samples make no full batch; use smaller batches, or drop_last=False"):
        check_share(0, 1, split="train", samples=2)


def test_bad_arguments_are_refused() -> None:
    samples = np.arange(3, dtype=np.int64)
    with pytest.raises(ValueError, match="batch_size=0"):
        counted_planner(samples, 0, seed=0)
    with pytest.raises(ValueError, match="max_tokens=0"):
        packed_planner(samples, samples, 0, seed=0)
    with pytest.raises(IndexError, match="batch 2 of an epoch of 2 batches"):
        counted_planner(samples, 2, seed=0)(0)[2]
