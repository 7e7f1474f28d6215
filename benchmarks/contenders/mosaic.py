"""MosaicML Streaming: MDS shards, StreamingDataset in a torch DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streaming
from streaming import MDSWriter, StreamingDataset

from contenders.common import FIELDS, WORKERS, Sample, Stock, from_bits, source_samples, to_bits

NAME = "MosaicML Streaming"
HOLDS = "uint16"
SETTINGS = WORKERS


def convert(source: Path, target: Path) -> None:
    """See the package."""
    kinds = ("uint16", "uint16", "int64", "int64")
    columns = {name: f"ndarray:{kind}" for name, kind in zip(FIELDS, kinds, strict=True)}
    with MDSWriter(out=str(target), columns=columns, size_limit=1 << 29) as writer:
        for sample in source_samples(source):
            writer.write({name: to_bits(sample[name]) for name in FIELDS})


class _Tensors(StreamingDataset):  # type: ignore[misc] # the package has no types
    def __getitem__(self, at: Any) -> Sample:
        held = super().__getitem__(at)
        return {name: from_bits(held[name]) for name in FIELDS}


def opened(target: Path, batch: int, *, workers: int) -> Stock:
    """See the package."""
    streaming.base.util.clean_stale_shared_memory()
    return _Shuffled(_Tensors(local=str(target), shuffle=True, batch_size=batch), batch, workers)


class _Shuffled(Stock):
    """It is an iterable dataset that shuffles by itself."""

    def __init__(self, dataset: Any, batch: int, workers: int) -> None:
        from streaming import StreamingDataLoader

        from contenders.common import as_list

        self._loader = StreamingDataLoader(
            dataset,
            batch_size=batch,
            num_workers=workers,
            collate_fn=as_list,
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
        )
