"""Under torchdata's StatefulDataLoader: every batch once, exact resume, with and without workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader

from hsloader import DataLoader, HiddenStateDataset
from tests.loader.making import PACKED, ids_of

SMALL: dict[str, Any] = {**PACKED, "max_tokens": 120}

pytestmark = pytest.mark.filterwarnings("ignore")


def wanted(path: Path, epoch: int) -> list[Any]:
    with DataLoader(path, **{**SMALL, "epoch": epoch}) as loader:
        return [ids_of(batch) for batch in loader]


def _loader(path: Path, workers: int) -> tuple[HiddenStateDataset, Any]:
    dataset = HiddenStateDataset(path, **SMALL)
    return dataset, StatefulDataLoader(dataset, batch_size=None, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 4])
def test_resume_in_the_middle_of_an_epoch(path: Path, workers: int, done: int) -> None:
    dataset, loader = _loader(path, workers)
    dataset.set_epoch(2)
    batches = iter(loader)
    seen = [ids_of(next(batches)) for _ in range(done)]
    state = loader.state_dict()
    json.dumps(state["_snapshot"]["_worker_snapshots"] if workers else state["fetcher_state"], default=str)
    del batches, loader
    dataset.close()
    dataset, loader = _loader(path, workers)
    loader.load_state_dict(state)
    assert seen + [ids_of(batch) for batch in loader] == wanted(path, 2)
    dataset.set_epoch(3)
    assert [ids_of(batch) for batch in loader] == wanted(path, 3)
    del loader
    dataset.close()


def test_resume_at_the_end_of_an_epoch(path: Path) -> None:
    dataset, loader = _loader(path, 0)
    assert [ids_of(batch) for batch in loader] == wanted(path, 0)
    state = loader.state_dict()
    dataset.close()
    dataset, loader = _loader(path, 0)
    loader.load_state_dict(state)
    assert [ids_of(batch) for batch in loader] == wanted(path, 1)
    dataset.close()
