"""torch.load in a torch DataLoader, as speculators 0.4 trains from its own files (in its own words, without noise).

The hidden tensors stay bfloat16; the script's default is a cast to float32, which costs more.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import Dataset

from contenders.common import WORKERS, Sample, Stock, source_files

NAME = "torch.load, DataLoader"
HOLDS = "bfloat16"
SETTINGS = [{**workers, "mapped": True} for workers in WORKERS] + [{**WORKERS[-1], "mapped": False}]


class _Files(Dataset[Sample]):
    def __init__(self, folder: Path, mapped: bool) -> None:
        self._files = source_files(folder)
        self._mapped = mapped

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        held = torch.load(self._files[index], mmap=self._mapped, weights_only=True, map_location="cpu")
        states = held["hidden_states"]
        return {
            "hidden_states": torch.cat(states[:-1], dim=-1),
            "last_hidden_state": states[-1],
            "input_ids": held["input_ids"],
            "loss_mask": held["loss_mask"],
        }


def opened(target: Path, batch: int, *, workers: int, mapped: bool) -> Stock:
    """See the package."""
    return Stock(_Files(target, mapped), batch, workers)
