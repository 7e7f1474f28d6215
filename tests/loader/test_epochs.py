"""Epochs, positions and states: every batch once, on any number of ranks, resumed anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsloader import DataLoader
from hsloader.errors import LoaderError, StateError
from hsloader.loading.course import Share
from hsloader.loading.settings import LoaderSettings
from hsloader.monitor.words import size_text
from hsloader.order.sequence import MOST_EPOCHS
from hsloader.store.dataset import open_dataset
from tests.loader.making import PACKED, PADDED, RAW, ids_of, write

SMALL: dict[str, Any] = {**PACKED, "max_tokens": 120}


def epoch_of(path: Path, epoch: int, **settings: Any) -> list[Any]:
    with DataLoader(path, **{**SMALL, "epoch": epoch, **settings}) as loader:
        return [ids_of(batch) for batch in loader]


def through_json(loader: DataLoader, **arguments: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict(**arguments)))


def test_each_iter_is_the_next_epoch(path: Path) -> None:
    with DataLoader(path, **SMALL) as loader:
        for epoch in range(3):
            assert [ids_of(batch) for batch in loader] == epoch_of(path, epoch)
            assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (epoch + 1, 0)


def test_a_break_goes_on_with_the_next_epoch(path: Path) -> None:
    with DataLoader(path, **SMALL) as loader:
        for _ in loader:
            break
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 1)
        assert [ids_of(batch) for batch in loader] == epoch_of(path, 1)


def test_set_epoch_chooses_the_epoch(path: Path) -> None:
    with DataLoader(path, **SMALL) as loader:
        for epoch in (5, 2, 2):
            loader.set_epoch(epoch)
            assert len(loader) == len(epoch_of(path, epoch))
            assert [ids_of(batch) for batch in loader] == epoch_of(path, epoch)


def test_a_new_iter_ends_the_old_one(path: Path) -> None:
    with DataLoader(path, **SMALL) as loader:
        old = iter(loader)
        next(old)
        new = iter(loader)
        with pytest.raises(LoaderError, match="a newer iter"):
            next(old)
        assert [ids_of(batch) for batch in new] == epoch_of(path, 1)
        with pytest.raises(StopIteration):
            next(new)
        third = iter(loader)
        next(third)
        assert next(new, None) is None  # what is over stays over
    assert next(new, None) is None


@pytest.mark.parametrize("settings", [SMALL, PADDED, RAW], ids=["packed", "padded", "raw"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_one_global_sequence(path: Path, settings: dict[str, Any], world: int) -> None:
    whole = epoch_of(path, 1, **settings) if settings is SMALL else None
    with DataLoader(path, **{**settings, "epoch": 1}) as loader:
        whole = [ids_of(batch) for batch in loader]
    shares = []
    for rank in range(world):
        with DataLoader(path, **{**settings, "epoch": 1}, rank=rank, world_size=world) as loader:
            assert len(loader) == len(whole) // world
            shares.append([ids_of(batch) for batch in loader])
    together = [batch for step in zip(*shares, strict=True) for batch in step]
    assert together == whole[: len(together)]


@pytest.mark.parametrize("done", [0, 1, 4])
def test_a_state_goes_on_exactly_there_on_any_number_of_ranks(path: Path, done: int) -> None:
    whole = epoch_of(path, 2)
    with DataLoader(path, rank=0, world_size=2, **{**SMALL, "epoch": 2}) as loader:
        batches = iter(loader)
        for _ in range(done):
            next(batches)
        state = through_json(loader)
    assert state["position"] == 2 * done
    shares = []
    for rank in range(3):
        with DataLoader(path, rank=rank, world_size=3, **SMALL) as loader:
            loader.load_state_dict(state)
            assert len(loader) == len(whole) // 3  # the whole epoch: wrappers count with it
            assert loader.state_dict() == state
            shares.append([ids_of(batch) for batch in loader])
            assert loader.state_dict()["epoch"] == 3
    rest = [batch for step in zip(*shares, strict=True) for batch in step]
    assert rest == whole[2 * done : 2 * done + len(rest)]


def test_states_of_what_the_loop_has_seen(path: Path) -> None:
    whole = epoch_of(path, 0)
    with DataLoader(path, **SMALL) as loader:
        fetched = list(loader)  # a wrapper that is ahead
        assert len(fetched) == len(whole)
        state = through_json(loader, batches_done=2)
        with pytest.raises(ValueError, match=f"batches_done={len(whole) + 1}"):
            loader.state_dict(batches_done=len(whole) + 1)
    with DataLoader(path, **SMALL) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)  # keeps the position, as it is that epoch's
        assert [ids_of(batch) for batch in loader] == whole[2:]
        assert [ids_of(batch) for batch in loader] == epoch_of(path, 1)


def test_set_epoch_of_another_epoch_drops_a_loaded_position(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DataLoader(path, **SMALL) as loader:
        next(iter(loader))
        state = through_json(loader)
    with DataLoader(path, **SMALL) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(4)
        assert "drops the loaded position 1 of epoch 0" in caplog.text
        assert [ids_of(batch) for batch in loader] == epoch_of(path, 4)


def test_load_is_refused_while_an_iteration_runs_only(path: Path) -> None:
    with DataLoader(path, **SMALL) as loader:
        state = through_json(loader)
        batches = iter(loader)
        next(batches)
        with pytest.raises(StateError, match="while an iteration runs"):
            loader.load_state_dict(state)
        del batches
        loader.load_state_dict(state)
        assert [ids_of(batch) for batch in loader] == epoch_of(path, 0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "seed=0, this loader has seed=1"),
        ({"max_tokens": 300}, "max_tokens=120, this loader has max_tokens=300"),
        ({"min_loss_tokens": 1}, "min_loss_tokens=0, this loader has min_loss_tokens=1"),
        ({"samples": [1, 2, 3, 4]}, "samples=nothing"),
        ({"order": "trainer"}, "order='hsloader'"),
    ],
)
def test_a_state_of_other_batches_is_refused(path: Path, other: dict[str, Any], message: str) -> None:
    with DataLoader(path, **SMALL) as loader:
        state = through_json(loader)
    with DataLoader(path, **{**SMALL, **other}) as loader, pytest.raises(StateError, match=message):
        loader.load_state_dict(state)


def test_a_trainers_own_order_is_not_elastic(path: Path) -> None:
    with DataLoader(path, order="trainer", rank=0, world_size=2, **SMALL) as loader:
        state = through_json(loader)
    with DataLoader(path, order="trainer", **SMALL) as loader, pytest.raises(StateError, match="world_size=2"):
        loader.load_state_dict(state)


def test_a_dataset_that_grows(tmp_path: Path) -> None:
    path = write(tmp_path / "data.hs", 12)
    with DataLoader(path, **SMALL) as running:
        whole = epoch_of(path, 0)
        batches = iter(running)
        assert ids_of(next(batches)) == whole[0]
        state = through_json(running)
        write(path, 12, first=100)
        # what runs goes on with what it opened, also in the next epoch
        assert [ids_of(batch) for batch in batches] == whole[1:]
        assert sum(map(len, map(ids_of, running))) == len(running._course.target(1, 0).plan)
    with DataLoader(path, **SMALL) as loader:
        loader.load_state_dict(state)
        assert [ids_of(batch) for batch in loader] == whole[1:]
        again = through_json(loader)
        assert again["segments"] == 2
        assert [ids_of(batch) for batch in loader] == epoch_of(path, 1)


def test_the_length_is_that_of_the_epoch_whose_loop_runs(path: Path) -> None:
    """Also while it works on the last batch, when the state stands at the next epoch already."""
    lengths = []
    with DataLoader(path, order="trainer", **SMALL) as loader:
        for _ in range(6):
            lengths.append(len(loader))
            seen = [len(loader) for _ in loader]
            assert seen == [lengths[-1]] * lengths[-1]
        assert len(set(lengths)) > 1  # packing makes epochs differ
        batches = iter(loader)
        while next(batches, None) is not None:
            pass
        loader.set_epoch(0)
        assert len(loader) == lengths[0]  # the iterator is still there, but over


def test_positions_at_the_borders_of_an_epoch(path: Path) -> None:
    whole, following = epoch_of(path, 0), epoch_of(path, 1)
    with DataLoader(path, **SMALL) as loader:
        state = through_json(loader)
    for position in (0, 1, len(whole) - 3, len(whole) - 1, len(whole)):
        got = []
        for rank in range(3):
            with DataLoader(path, rank=rank, world_size=3, **SMALL) as loader:
                loader.load_state_dict({**state, "position": position})
                got.append([ids_of(batch) for batch in loader])
                assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
                assert next(iter(loader)) is not None
        steps = (len(whole) - position) // 3
        assert [len(batches) for batches in got] == [steps] * 3
        together = [batch for step in zip(*got, strict=True) for batch in step]
        assert together == whole[position : position + 3 * steps]
    with DataLoader(path, **SMALL) as loader:
        loader.load_state_dict({**state, "position": len(whole)})
        assert list(loader) == []
        assert [ids_of(batch) for batch in loader] == following


@pytest.mark.parametrize("worker", [3, {"number": 0, "of": 1}, {"number": 0, "of": 1, "taken": -1}])
def test_a_state_with_a_nonsensical_worker_is_refused(path: Path, worker: Any) -> None:
    with DataLoader(path, **SMALL) as loader, pytest.raises(StateError, match="worker is"):
        loader.load_state_dict({**through_json(loader), "worker": worker})


def test_another_dataset_is_refused(tmp_path: Path, path: Path) -> None:
    with DataLoader(path, **SMALL) as loader:
        state = through_json(loader)
    other = write(tmp_path / "other.hs", 12, first=7)
    with DataLoader(other, **SMALL) as loader, pytest.raises(StateError, match="belongs to another dataset"):
        loader.load_state_dict(state)


def test_speculators_skip_into_an_epoch(path: Path) -> None:
    """What its Trainer does to resume: list the epoch, cache the rest, iterate."""
    whole = epoch_of(path, 3)
    with DataLoader(path, **SMALL) as loader:
        sampler = loader.batch_sampler
        sampler.set_epoch(3)
        assert len(loader) == len(whole)
        everything = sampler._generate_batches(3)
        sampler._cached_generated_batches = (3, everything[2:])
        assert len(loader) == len(whole) - 2
        assert [ids_of(batch) for batch in loader] == whole[2:]
        sampler.set_epoch(4)
        assert [ids_of(batch) for batch in loader] == epoch_of(path, 4)


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ({"split": "all"}, True),
        ({"split": "val", "val_ratio": 0.3}, False),
        ({"split": "all", "max_length": 20}, False),
    ],
    ids=["whole", "split", "cut"],
)
def test_the_opening_line_tells_a_part_from_the_whole(
    path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], whole: bool
) -> None:
    caplog.set_level("INFO", "hsloader")
    with open_dataset(path) as dataset:
        manifest = dataset.manifest
        with DataLoader(dataset, **{**RAW, **settings}) as loader:
            tokens = int(dataset.lengths[loader._epochs.usable].clip(max=settings.get("max_length")).sum())
    stored, used = size_text(manifest.stored_bytes), size_text(tokens * manifest.raw_bytes // manifest.tokens)
    sizes = f"{used} ({stored} on disk)" if whole else f"{used} (the whole dataset is {stored} on disk)"
    assert f" {tokens:,} tokens, {sizes}; " in caplog.messages[0]
    assert whole == (tokens == manifest.tokens)


@pytest.mark.parametrize("settings", [PACKED, {**RAW, "batch_size": None}], ids=["shifted", "raw"])
def test_the_opening_line_counts_what_a_pack_leaves_of_a_sample(
    path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    caplog.set_level("INFO", "hsloader")
    with open_dataset(path) as dataset:
        samples = np.flatnonzero(dataset.lengths > 6).tolist()
        whole = int(dataset.lengths[samples].sum())
        with DataLoader(dataset, **{**settings, "max_tokens": 5, "samples": samples}) as loader:
            list(loader)
            handed_out = int(loader.stats()["tokens"])
    count = len(samples)
    assert handed_out == 5 * count
    assert f"data.hs: {count} samples, {handed_out} tokens, " in caplog.text
    assert f"train: {count} samples -> {count}: {count} cut to 5 tokens ({whole - handed_out} tokens less)" in (
        caplog.text.replace(",", "")
    )


def test_train_and_val_share_the_dataset(path: Path) -> None:
    with open_dataset(path) as dataset:
        everything = {int(dataset.read(i, "input_ids").sum()) for i in range(len(dataset))}
    seen = []
    for split in ("train", "val"):
        with DataLoader(path, split=split, val_ratio=0.25, **{**RAW, "batch_size": 1}) as loader:
            epochs = [[ids_of(batch)[0] for batch in loader] for _ in range(2)]
        assert sorted(epochs[0]) == sorted(epochs[1])
        assert (epochs[0] == epochs[1]) == (split == "val")  # validation is in a fixed order
        seen.append(set(epochs[0]))
    assert seen[0] | seen[1] == everything
    assert not seen[0] & seen[1]


def test_leaving_batches_out_is_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hsloader")
    whole = len(epoch_of(path, 0))
    world = next(n for n in range(2, whole) if whole % n)
    with DataLoader(path, rank=0, world_size=world, **SMALL):
        pass
    assert f"left out, too few for a step of {world} ranks" in caplog.text


def test_iterating_a_closed_loader(path: Path) -> None:
    loader = DataLoader(path, **SMALL)
    batches = iter(loader)
    next(batches)
    loader.close()
    loader.close()
    with pytest.raises(LoaderError, match="closed"):
        next(batches)
    with pytest.raises(LoaderError, match="closed"):
        iter(loader)
    assert loader.state_dict()["position"] == 1


def test_the_last_epoch_that_can_be_named(path: Path) -> None:
    last = MOST_EPOCHS - 1
    with DataLoader(path, **{**SMALL, "epoch": last}) as loader:
        assert len(list(loader)) == len(epoch_of(path, last))


def test_a_refused_state_changes_nothing(path: Path) -> None:
    """Also not what ``len()`` counts after a skip."""
    with DataLoader(path, **SMALL) as loader:
        state = through_json(loader)
        everything = loader.batch_sampler._generate_batches(0)
        loader.batch_sampler._cached_generated_batches = (0, everything[2:])
        batches = iter(loader)
        next(batches)
        with pytest.raises(StateError, match="while an iteration runs"):
            loader.load_state_dict(state)
        assert len(loader) == len(everything) - 2


def test_a_workers_iteration_that_was_left_is_not_begun_again(path: Path) -> None:
    """Persistent workers: a resumed epoch that ends by ``break`` gives way to the next one."""
    share = Share(1, 2)
    with DataLoader._planned(path, LoaderSettings.of(SMALL), share) as loader:
        batches = iter(loader)
        next(batches)
        state = through_json(loader)
    with DataLoader._planned(path, LoaderSettings.of(SMALL), share) as loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        next(batches)
        del batches
        assert through_json(loader)["epoch"] == 0
        assert not loader._course.loaded
        assert loader._course.upcoming == (1, 0)
