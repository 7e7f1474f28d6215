"""speculators' packing order against index lists recorded from its own sampler."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hsloader.order.multipack import multipack_batches
from hsloader.order.planning import multipack_planner
from hsloader.order.sequence import BatchSequence
from tests.shared_data import SHARED, needs_shared


def recorded(version: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    document = json.loads((SHARED / f"golden/cases/speculators-multipack-{version}.0/expected.json").read_text())
    return document["lists"], document["entries"]


def planned(entry: dict[str, Any], spec: dict[str, Any], version: str) -> BatchSequence:
    return multipack_batches(
        np.arange(len(spec["lengths"])),
        np.array(spec["lengths"]),
        spec["T"],
        version=f"multipack-{version}",
        seed=entry["seed"],
        epoch=entry["epoch"],
        world=entry["world_size"],
        truncate=spec.get("truncate_long_samples", True),
        max_batches=entry.get("max_batches"),
    )


@needs_shared
@pytest.mark.parametrize("version", ["0.4", "0.7", "0.9"])
def test_recorded_index_lists(version: str) -> None:
    lists, entries = recorded(version)
    exact = 0
    for entry in entries:
        spec, world = lists[entry["list"]], entry["world_size"]
        plan = planned(entry, spec, version)
        got = [[plan[i].tolist() for i in range(rank, len(plan), world)] for rank in range(world)]
        if not entry["ties"]:
            assert got == entry["batches_per_rank"], entry
            exact += 1
            continue
        # Equal lengths: which of them goes where depends on the CPU's argsort. What does not depend on it:
        cut = np.minimum(spec["lengths"], spec["T"])
        for ours, theirs in zip(got, entry["batches_per_rank"], strict=True):
            assert [sorted(cut[b].tolist()) for b in ours] == [sorted(cut[b].tolist()) for b in theirs], entry
        for ours, theirs in zip(zip(*got, strict=True), zip(*entry["batches_per_rank"], strict=True), strict=True):
            assert {i for b in ours for i in b} == {i for b in theirs for i in b}, entry
    assert exact > 90


def test_a_subset_keeps_its_dataset_indices() -> None:
    lengths = np.array([5, 9, 3, 7, 8, 2])
    whole = multipack_batches(np.arange(6), lengths, 12, version="multipack-0.9", seed=0, epoch=0, world=2)
    moved = multipack_batches(np.arange(6) + 100, lengths, 12, version="multipack-0.9", seed=0, epoch=0, world=2)
    assert [batch.tolist() for batch in moved] == [(batch + 100).tolist() for batch in whole]


def test_too_few_samples_for_the_ranks_make_no_batch() -> None:
    plan = multipack_planner(np.arange(2), np.array([4, 4]), 8, version="multipack-0.4", seed=0, world=3)
    assert len(plan(0)) == 0


def test_unknown_version() -> None:
    with pytest.raises(ValueError, match=r"'multipack-1': expected one of multipack-0\.4"):
        multipack_planner(np.arange(2), np.array([4, 4]), 8, version="multipack-1", seed=0, world=1)
