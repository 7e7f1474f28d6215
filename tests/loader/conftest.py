"""A dataset that the loader's tests read and none changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hsloader.reader import choices
from hsloader.store.dataset import Dataset, open_dataset
from tests.loader.making import write


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 samples of up to 90 tokens."""
    return write(tmp_path_factory.mktemp("loader") / "data.hs")


@pytest.fixture
def dataset(path: Path) -> Iterator[Dataset]:
    """That dataset, open."""
    with open_dataset(path) as dataset:
        yield dataset


@pytest.fixture(autouse=True)
def _four_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are many cores the default ring has more."""
    monkeypatch.setattr(choices, "usual_slots", lambda options, slot_bytes: 4)
