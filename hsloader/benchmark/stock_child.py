"""The process that loads .pt files as a stock training script does; ``stock.py`` starts it and asks it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hsloader._launch import Parent

__all__ = ["main"]


class _Files(Dataset[Any]):
    def __init__(self, files: Sequence[str], mapped: bool) -> None:
        self._files = list(files)
        self._mapped = mapped

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        # mmap: the pages come with the first access, as in training, so every tensor is touched once.
        sample = torch.load(self._files[index], map_location="cpu", weights_only=True, mmap=self._mapped)
        return _cloned(sample) if self._mapped else sample


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return [_cloned(item) for item in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _first(batch: list[Any]) -> Any:
    return batch[0]


def _measure(files: Sequence[str], workers: int, mapped: bool, seconds: float) -> dict[str, float]:
    cpu = sum(os.times()[:4])
    begun = last = time.monotonic()
    size = 0
    loader = DataLoader(_Files(files, mapped), batch_size=1, num_workers=workers, collate_fn=_first, shuffle=True)
    turns = iter(loader)
    first_seconds = 0.0
    for sample in turns:
        last = time.monotonic()
        first_seconds = first_seconds or last - begun
        size += sum(tensor.nbytes for tensor in _tensors(sample))
        if last - begun > seconds:
            break
    del turns, loader  # ends the workers, whose time then counts
    return {"size": size, "seconds": last - begun, "first": first_seconds, "cpu": sum(os.times()[:4]) - cpu}


def main(parent: Parent) -> None:
    """Answer each line of the parent's channel with one measurement."""
    # Workers are ended by signals, and ctrl-C is to end this process with its workers.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    files = parent.args["files"]
    with parent.channel.makefile("rwb") as channel:
        channel.write(b"{}\n")
        channel.flush()
        for line in channel:
            asked = json.loads(line)
            try:
                answer: dict[str, Any] = dict(_measure(files, asked["workers"], asked["mmap"], asked["seconds"]))
            except Exception as error:  # what torch.load or a worker raises is the answer
                answer = {"error": f"{type(error).__name__}: {error}"}
            channel.write(json.dumps(answer).encode() + b"\n")
            channel.flush()
