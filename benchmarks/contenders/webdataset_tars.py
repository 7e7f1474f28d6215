"""WebDataset: tar shards of .npy members, shards and a buffer of samples shuffled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webdataset
from torch.utils.data import DataLoader

from contenders.common import FIELDS, WORKERS, Sample, as_list, from_bits, source_samples, to_bits

NAME = "WebDataset"
HOLDS = "uint16"
SETTINGS = WORKERS


def convert(source: Path, target: Path) -> None:
    """See the package."""
    with webdataset.ShardWriter(f"{target}/%06d.tar", maxsize=2**28, verbose=0) as writer:
        for number, sample in enumerate(source_samples(source)):
            writer.write({"__key__": f"{number:08d}", **{f"{name}.npy": to_bits(sample[name]) for name in FIELDS}})


def _tensors(held: dict[str, Any]) -> Sample:
    return {name: from_bits(held[f"{name}.npy"]) for name in FIELDS}


class _Loader:
    def __init__(self, target: Path, batch: int, workers: int) -> None:
        shards = sorted(str(path) for path in target.glob("*.tar"))
        many = batch > 1  # a buffer of large samples would only hold them back
        dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
        dataset = (dataset.shuffle(8 * batch) if many else dataset).decode().map(_tensors)
        self._loader: DataLoader[list[Sample]] = DataLoader(
            dataset,
            batch_size=batch,
            num_workers=workers,
            collate_fn=as_list,
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
        )

    def epoch(self) -> Iterator[list[Sample]]:
        return iter(self._loader)


def opened(target: Path, batch: int, *, workers: int) -> _Loader:
    """See the package."""
    return _Loader(target, batch, workers)
