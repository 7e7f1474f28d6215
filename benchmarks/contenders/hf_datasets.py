"""Hugging Face datasets: Arrow files mapped into memory, rows as numpy, a torch DataLoader around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from torch.utils.data import Dataset

from contenders.common import FIELDS, WORKERS, Sample, Stock, from_bits, source_samples, to_bits

NAME = "Hugging Face datasets"
HOLDS = "uint16"
SETTINGS = WORKERS


def _rows(source: str) -> Iterator[dict[str, Any]]:
    for sample in source_samples(Path(source)):
        yield {name: to_bits(sample[name]).reshape(-1) for name in FIELDS}


def convert(source: Path, target: Path) -> None:
    """See the package."""
    kinds = ("uint16", "uint16", "int64", "int64")
    # Plain lists count in 32 bits, which a batch of such samples overflows.
    columns = {name: datasets.LargeList(datasets.Value(kind)) for name, kind in zip(FIELDS, kinds, strict=True)}
    made = datasets.Dataset.from_generator(
        _rows,
        gen_kwargs={"source": str(source)},
        features=datasets.Features(columns),
        cache_dir=str(target / "cache"),
        writer_batch_size=1,
    )
    made.save_to_disk(str(target / "rows"), max_shard_size="500MB")
    made.cleanup_cache_files()


class _Rows(Dataset[Sample]):
    def __init__(self, target: Path) -> None:
        self._rows = datasets.load_from_disk(str(target / "rows")).with_format("numpy")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        held = self._rows[index]
        tokens = len(held["input_ids"])
        return {name: from_bits(held[name].reshape(tokens, -1)) for name in FIELDS}


def opened(target: Path, batch: int, *, workers: int) -> Stock:
    """See the package."""
    datasets.disable_progress_bars()
    return Stock(_Rows(target), batch, workers)
