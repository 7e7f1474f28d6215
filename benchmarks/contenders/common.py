"""What the contenders share: samples as they are in the .pt files, bits, a stock DataLoader, reads ahead in threads."""

from __future__ import annotations

import os
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

Sample = dict[str, torch.Tensor]

FIELDS = ("hidden_states", "last_hidden_state", "input_ids", "loss_mask")
CORES = len(os.sched_getaffinity(0))
WORKERS = [{"workers": n} for n in ((0, 4, 8) if CORES >= 8 else (0, 2, 4))]

# Maps of files are read-only, and nobody writes to them here.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")


def source_files(source: Path) -> list[Path]:
    """The .pt files, in the order of their numbers."""
    return sorted(source.glob("data_*.pt"), key=lambda path: int(path.stem.split("_")[1]))


def source_samples(source: Path) -> Iterator[Sample]:
    """hidden_states [S, layers, H] and last_hidden_state [S, H] bfloat16, input_ids and loss_mask int64 [S]."""
    for path in source_files(source):
        held = torch.load(path, weights_only=True, mmap=True)
        states = held["hidden_states"]
        yield {
            "hidden_states": torch.stack(states[:-1], dim=1),
            "last_hidden_state": states[-1].clone(),
            "input_ids": held["input_ids"].clone(),
            "loss_mask": held["loss_mask"].clone(),
        }


def row_blocks(source: Path, rows: int) -> Iterator[tuple[int, dict[str, npt.NDArray[Any]]]]:
    """All samples one after another, in blocks of ``rows`` rows: (first row, bits by field)."""
    held: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in FIELDS}
    first = count = 0
    for sample in source_samples(source):
        for name in FIELDS:
            held[name].append(to_bits(sample[name]))
        count += len(sample["input_ids"])
        if count >= rows:
            joined = {name: np.concatenate(parts) for name, parts in held.items()}
            while count >= rows:
                yield first, {name: array[:rows] for name, array in joined.items()}
                joined = {name: array[rows:] for name, array in joined.items()}
                first, count = first + rows, count - rows
            held = {name: [array.copy()] for name, array in joined.items()}
    if count:
        yield first, {name: np.concatenate(parts) for name, parts in held.items()}


def sample_ends(source: Path) -> npt.NDArray[np.int64]:
    """The row after the last one of each sample."""
    files = source_files(source)
    lengths = [len(torch.load(path, weights_only=True, mmap=True)["input_ids"]) for path in files]
    return np.cumsum(np.array(lengths, np.int64))


def to_bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A numpy array; bfloat16 as uint16."""
    array: npt.NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def from_bits(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor on the same memory; uint16 as bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def as_list(samples: list[Sample]) -> list[Sample]:
    """The collate function of all: a batch is a list of samples, nothing is padded."""
    return [{name: sample[name] for name in FIELDS} for sample in samples]


class Stock:
    """A torch DataLoader over a map-style dataset, as training scripts make it."""

    def __init__(self, dataset: Dataset[Sample], batch: int, workers: int) -> None:
        self._loader = DataLoader(
            dataset,
            batch_size=batch,
            shuffle=True,
            num_workers=workers,
            collate_fn=as_list,
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
        )

    def epoch(self) -> Iterator[list[Sample]]:
        """One pass."""
        return iter(self._loader)


class Threads:
    """Reads samples ahead in threads, for libraries whose reads release the GIL."""

    def __init__(self, read: Callable[[int], Sample], count: int, batch: int, threads: int) -> None:
        self._read, self._count, self._batch, self._threads = read, count, batch, threads
        self._pool = ThreadPoolExecutor(max(1, threads))

    def epoch(self) -> Iterator[list[Sample]]:
        """One pass; ``threads`` samples ahead, none with 0 threads."""
        order = list(range(self._count))
        random.Random(0).shuffle(order)
        held: list[Sample] = []
        for sample in self._samples(order):
            held.append(sample)
            if len(held) == self._batch:
                yield held
                held = []
        if held:
            yield held

    def _samples(self, order: Sequence[int]) -> Iterator[Sample]:
        waiting: deque[Future[Sample]] = deque()
        for index in order:
            if not self._threads:
                yield self._read(index)
                continue
            waiting.append(self._pool.submit(self._read, index))
            if len(waiting) > self._threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
