"""One safetensors file a sample in a torch DataLoader, as speculators 0.9 does (``load_file``, then views of it)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset

from contenders.common import WORKERS, Sample, Stock, source_samples

NAME = "safetensors, DataLoader"
HOLDS = "bfloat16"
SETTINGS = WORKERS


def convert(source: Path, target: Path) -> None:
    """See the package."""
    for number, sample in enumerate(source_samples(source)):
        states = torch.cat([sample["hidden_states"], sample["last_hidden_state"][:, None]], dim=1)
        tensors = {"hidden_states": states, "token_ids": sample["input_ids"], "loss_mask": sample["loss_mask"]}
        save_file(tensors, target / f"hs_{number}.safetensors")


class _Files(Dataset[Sample]):
    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.glob("hs_*.safetensors"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        held = load_file(self._files[index])
        states = held["hidden_states"]
        return {
            "hidden_states": states[:, :-1].flatten(1),
            "last_hidden_state": states[:, -1],
            "input_ids": held["token_ids"],
            "loss_mask": held["loss_mask"],
        }


def opened(target: Path, batch: int, *, workers: int) -> Stock:
    """See the package."""
    return Stock(_Files(target), batch, workers)
