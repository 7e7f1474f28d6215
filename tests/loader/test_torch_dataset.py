"""HiddenStateDataset in torch's own DataLoader: no workers, workers that live for an epoch, workers that live on."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hsloader import DataLoader, HiddenStateDataset, ReadOptions
from hsloader.loading.course import Share
from hsloader.loading.settings import LoaderSettings
from tests.loader.making import PACKED, RAW, assert_same, clone, ids_of

SMALL: dict[str, Any] = {**PACKED, "max_tokens": 120}


@pytest.fixture
def items(path: Path) -> Iterator[HiddenStateDataset]:
    dataset = HiddenStateDataset(path, **SMALL)
    yield dataset
    dataset.close()


def wanted(path: Path, epoch: int, **settings: Any) -> list[Any]:
    with DataLoader(path, **{**SMALL, "epoch": epoch, **settings}) as loader:
        return [clone(batch) for batch in loader]


def test_without_workers_it_is_the_loader(path: Path, items: HiddenStateDataset) -> None:
    stock = torch.utils.data.DataLoader(items, batch_size=None)
    for epoch in range(2):
        assert len(stock) == len(items)
        assert_same(list(stock), wanted(path, epoch))
    items.set_epoch(7)
    assert_same(list(stock), wanted(path, 7))
    assert items.stats()["batches"] > 0


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_workers_give_every_batch_once_in_order(
    path: Path, items: HiddenStateDataset, start: str, persistent: bool
) -> None:
    stock = torch.utils.data.DataLoader(
        items, batch_size=None, num_workers=2, persistent_workers=persistent, multiprocessing_context=start
    )
    for epoch in (0, 3):
        items.set_epoch(epoch)
        assert len(stock) == len(wanted(path, epoch))
        got = [clone(batch) for batch in stock]
        assert_same(got, wanted(path, epoch))
    _end(stock)


def _end(stock: Any) -> None:
    """torch ends persistent workers when their iterator is collected, and leaves its queues' files to the collector."""
    if stock._iterator is not None:
        stock._iterator._shutdown_workers()
        stock._iterator = None
    for process in torch.multiprocessing.active_children():
        process.join(10)


def test_a_repeated_epoch_is_warned_about(path: Path, items: HiddenStateDataset, capfd: Any) -> None:
    stock = torch.utils.data.DataLoader(items, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    items.set_epoch(0)
    first = [ids_of(batch) for batch in stock]
    assert "through /dev/shm" in capfd.readouterr().err
    assert [ids_of(batch) for batch in stock] == first
    assert "epoch 0 is read again" in capfd.readouterr().err
    items.set_epoch(1)
    assert [ids_of(batch) for batch in stock] != first
    assert "read again" not in capfd.readouterr().err
    _end(stock)


def test_lists_of_samples_travel_too(path: Path) -> None:
    dataset = HiddenStateDataset(path, **RAW)
    stock = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert_same([clone(batch) for batch in stock], wanted(path, 0, **{**RAW, "max_tokens": None}))
    _end(stock)
    dataset.close()


@pytest.mark.parametrize("worker", [0, 1])
def test_each_worker_reports_stalls_as_its_rank_and_the_first_speaks(
    path: Path, worker: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hsloader")
    settings = LoaderSettings.of({**RAW, "read": ReadOptions(in_process=True)})
    with DataLoader._planned(path, settings, Share(worker, 2)) as loader:
        next(iter(loader))
        assert ("first batch" in caplog.text) == (worker == 0)
        caplog.clear()
        loader._connection.reporter.stalled(12.0)  # type: ignore[union-attr]
    assert caplog.messages[0].startswith(f"worker {worker} of 2: next() has waited 12 s")  # no "rank 1: "


def test_lines_of_one_worker_say_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hsloader")
    settings = LoaderSettings.of({**RAW, "read": ReadOptions(in_process=True)})
    with DataLoader._planned(path, settings, Share(0, 2)) as loader:
        assert len(list(loader)) == 6
        len(loader)  # sees that the epoch is over
    assert caplog.messages[0].startswith("worker 0 of 2: ")
    assert "; 6 of 12 batches an epoch; reads by pread (in threads of this process), ring of" in caplog.messages[0]
    assert [text.partition(":")[0] for text in caplog.messages] == 3 * ["worker 0 of 2"]
    assert caplog.messages[2].startswith("worker 0 of 2: epoch 0 is over")


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_not_stacked_into_batches(path: Path, items: HiddenStateDataset, workers: int) -> None:
    for size in (1, 4):
        stock = torch.utils.data.DataLoader(items, batch_size=size, num_workers=workers)
        with pytest.raises(ValueError, match="batch_size=None"):
            next(iter(stock))
    _end(stock)
    if not workers:
        own = torch.utils.data.DataLoader(items, batch_size=1, collate_fn=lambda batches: batches[0])
        assert_same(list(own), wanted(path, 0))


@pytest.mark.parametrize("refused", ["device", "pin_memory", "batch_sampler"])
def test_what_it_does_not_take(path: Path, refused: str) -> None:
    with pytest.raises(TypeError, match=f"takes no {refused}="):
        HiddenStateDataset(path, **{refused: "cpu"}, **SMALL)  # type: ignore[misc]


def test_an_iterator_that_gives_nothing_costs_no_epoch(path: Path, items: HiddenStateDataset) -> None:
    iter(items)
    iter(items)
    assert_same(list(items), wanted(path, 0))


def test_states_and_pickles(path: Path, items: HiddenStateDataset) -> None:
    batches = iter(items)
    next(batches)
    state = items.state_dict()
    del batches
    copy = pickle.loads(pickle.dumps(items))
    copy.load_state_dict(state)
    assert_same(list(copy), wanted(path, 0)[1:])
    copy.close()
