"""Makes the datasets that a benchmark reads where PATH is none: converted from .pt files, or synthetic."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hsloader.benchmark.timing import Deadline
from hsloader.store.dataset import Dataset, open_dataset
from hsloader.store.writer import Writer

__all__ = ["copy_files", "synthetic_dataset"]

_LAYERS = 3
_DISTINCT_ROWS = 2048


def synthetic_dataset(
    path: Path,
    *,
    hidden_size: int,
    tokens: int,
    most: int,
    threads: int,
    deadline: Deadline,
    progress: Callable[[int], None] = lambda size: None,
) -> Dataset:
    """Write samples of ``tokens`` tokens until ``most`` decoded bytes or the deadline (at least two).

    States as bf16 bits whose exponents spread as those of real ones do, so that they compress as real ones.
    """
    rng = np.random.default_rng(0)
    width = (_LAYERS + 1) * hidden_size
    scales = rng.lognormal(0.0, 0.3, width).astype(np.float32)
    values = rng.standard_normal((min(_DISTINCT_ROWS, tokens), width), dtype=np.float32)
    values *= scales * rng.lognormal(0.0, 0.15, (len(values), 1)).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    del values
    fields = {
        "hidden_states": ("bfloat16", (_LAYERS, hidden_size)),
        "last_hidden_state": ("bfloat16", (hidden_size,)),
        "input_ids": "int32",
        "loss_mask": "uint8",
    }
    size = count = 0
    with Writer(path, fields, typical_length=tokens, threads=threads, norm_state="pre") as writer:
        while count < 2 or (size < most and deadline.left > 0):
            rows = np.take(bits, rng.permutation(tokens) % len(bits), axis=0)
            cut = _LAYERS * hidden_size
            writer.append(
                hidden_states=np.ascontiguousarray(rows[:, :cut]).reshape(tokens, _LAYERS, hidden_size),
                last_hidden_state=np.ascontiguousarray(rows[:, cut:]),
                input_ids=rng.integers(0, 32_000, tokens, dtype=np.int32),
                loss_mask=(np.arange(tokens) >= tokens // 3).astype(np.uint8),
            )
            count += 1
            size += rows.nbytes
            progress(size)
    return open_dataset(path)


def copy_files(files: Sequence[Path], folder: Path, most: int, deadline: Deadline) -> list[Path]:
    """Copy files into ``folder`` until ``most`` bytes or the deadline (at least one), durable, each in its own folder.

    Files of more than twice ``most`` are passed over; if all are, nothing is copied.  Their settings file goes with
    them, so that what is told there is known of the copies too.
    """
    copies: list[Path] = []
    size = 0
    for number, file in enumerate(files):
        length = file.stat().st_size
        if length > 2 * most:
            continue
        if copies and (size + length > most or deadline.left <= 0):
            break
        target = folder / f"{number:06d}" / file.name
        target.parent.mkdir()
        shutil.copyfile(file, target)
        with target.open("rb") as copied:
            os.fsync(copied.fileno())
        copies.append(target)
        size += length
    settings = files[0].parent / "data_config.json"
    if settings.is_file():
        shutil.copyfile(settings, folder / settings.name)
    return copies
