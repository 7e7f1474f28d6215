"""Datasets that several of the reader's tests read and none changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hsloader.store.dataset import Dataset, open_dataset
from tests.reader.making import every_type, make_dataset


@pytest.fixture(scope="session")
def _usual_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with make_dataset(tmp_path_factory.mktemp("usual") / "data.hs") as dataset:
        return dataset.path


@pytest.fixture(scope="session")
def _typed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with make_dataset(tmp_path_factory.mktemp("typed") / "data.hs", every_type(), samples=12) as dataset:
        return dataset.path


@pytest.fixture
def usual(_usual_path: Path) -> Iterator[Dataset]:
    """The four usual fields, a few segments and shards."""
    with open_dataset(_usual_path) as dataset:
        yield dataset


@pytest.fixture
def typed(_typed_path: Path) -> Iterator[Dataset]:
    """A state field and a token field of every data type."""
    with open_dataset(_typed_path) as dataset:
        yield dataset


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Dataset]:
    """A dataset that the test may damage."""
    with make_dataset(tmp_path / "data.hs", samples=12) as dataset:
        yield dataset
