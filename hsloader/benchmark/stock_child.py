"""The process that loads .pt files as a stock training script does; ``stock.py`` starts it and asks it."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from hsloader._launch import Parent

__all__ = ["main"]


class _Files(Dataset[Any]):
    def __init__(self, files: Sequence[str], mapped: bool) -> None:
        self._files = list(files)
        self._mapped = mapped

    def __getitem__(self, index: int) -> Any:
        if index < 0:
            return None  # a worker that has answered runs
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


class _Order(list[int]):
    """The sampler: a list of indices that is changed between two iterations."""


def _measure(files: Sequence[str], asked: Mapping[str, Any]) -> dict[str, float]:
    """One pass over the files (many if ``again``) in running workers; the start of the workers counts for ``first``."""
    workers = int(asked["workers"])
    order = _Order([-1] * max(1, 2 * workers))
    begun = time.monotonic()
    loader = DataLoader(
        _Files(files, asked["mmap"]),
        batch_size=1,
        sampler=order,
        num_workers=workers,
        collate_fn=_first,
        persistent_workers=workers > 0,
    )
    for _ in loader:
        pass
    indices = list(range(len(files)))
    random.Random(0).shuffle(indices)
    order[:] = indices * (64 if asked["again"] else 1)
    started, cpu = time.monotonic(), _cpu()
    first = last = started
    size = 0
    for sample in loader:
        last = time.monotonic()
        first = last if not size else first
        size += sum(tensor.nbytes for tensor in _tensors(sample))
        if last - started > asked["seconds"]:
            break
    used = _cpu() - cpu
    return {"size": size, "seconds": last - started, "first": first - begun, "cpu": used}


def _cpu() -> float:
    """Processor seconds of this process and of its children, which still run."""
    me = psutil.Process()
    times = [me.cpu_times(), *(child.cpu_times() for child in me.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def main(parent: Parent) -> None:
    """Take the files from the first line of the parent's channel, answer each further one with a measurement."""
    # Workers are ended by signals, and ctrl-C is to end this process with its workers.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    with parent.channel.makefile("rwb") as channel:
        files = json.loads(channel.readline())["files"]
        channel.write(b"{}\n")
        channel.flush()
        for line in channel:
            asked = json.loads(line)
            try:
                answer: dict[str, Any] = dict(_measure(files, asked))
            except Exception as error:  # what torch.load or a worker raises is the answer
                answer = {"error": f"{type(error).__name__}: {error}"}
            channel.write(json.dumps(answer).encode() + b"\n")
            channel.flush()
