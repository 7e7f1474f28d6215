"""LitData: chunks written by ``optimize``, StreamingDataset in its StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litdata
import torch

from contenders.common import FIELDS, WORKERS, Sample, from_bits, source_files, to_bits

NAME = "LitData"
HOLDS = "uint16"
SETTINGS = WORKERS


def _item(path: str) -> dict[str, Any]:
    held = torch.load(path, weights_only=True, mmap=True)
    states = held["hidden_states"]
    tensors = (torch.stack(states[:-1], dim=1), states[-1], held["input_ids"], held["loss_mask"])
    return {name: to_bits(tensor) for name, tensor in zip(FIELDS, tensors, strict=True)}


def convert(source: Path, target: Path) -> None:
    """See the package."""
    files = [str(path) for path in source_files(source)]
    litdata.optimize(_item, files, str(target), chunk_bytes="256MB", num_workers=2, verbose=False)


class _Loader:
    def __init__(self, target: Path, batch: int, workers: int) -> None:
        dataset = litdata.StreamingDataset(str(target), shuffle=True, drop_last=False)
        self._loader = litdata.StreamingDataLoader(
            dataset,
            batch_size=batch,
            num_workers=workers,
            collate_fn=_tensors,
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
        )

    def epoch(self) -> Iterator[list[Sample]]:
        return iter(self._loader)


def _tensors(samples: list[dict[str, Any]]) -> list[Sample]:
    return [{name: from_bits(sample[name]) for name in FIELDS} for sample in samples]


def opened(target: Path, batch: int, *, workers: int) -> _Loader:
    """See the package."""
    return _Loader(target, batch, workers)
