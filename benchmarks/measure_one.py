"""One contender, one process: converts or reads, and prints one line of JSON. ``suite.py`` starts it.

python benchmarks/measure_one.py CONTENDER convert|read '{"source": ..., "target": ..., "batch": 1, ...}'
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch


def convert(module: Any, asked: dict[str, Any]) -> dict[str, float]:
    """Convert, and make every file durable."""
    target = Path(asked["target"])
    begun, cpu = time.monotonic(), processor_seconds()
    module.convert(Path(asked["source"]), target)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return {"seconds": time.monotonic() - begun, "cpu": processor_seconds() - cpu}


def read(module: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Two epochs: the first from a cold page cache, the second from what that left in it.

    ``rate`` is that of the whole epoch, from opening to the last batch, ``first`` the seconds to the first batch.
    ``after_first`` leaves the first batch and the time until it out; it flatters those whose workers have much of a
    small set ready by then.
    """
    begun = time.monotonic()
    loader = module.opened(Path(asked["target"]), asked["batch"], **asked["settings"])
    return {"cold": epoch(loader, begun), "warm": epoch(loader, time.monotonic())}


def epoch(loader: Any, begun: float) -> dict[str, float]:
    """One epoch. A byte of each page of each tensor is touched: a map that nobody reads is no tensor."""
    cpu = processor_seconds()
    first = last = 0.0
    size = early = samples = 0
    for batch in loader.epoch():
        for sample in batch:
            size += sum(touched(tensor) for tensor in sample.values())
            samples += 1
        last = time.monotonic()
        if not first:
            first, early = last, size
    used = processor_seconds() - cpu
    found = {
        "rate": size / (last - begun),
        "after_first": (size - early) / max(1e-6, last - first),
        "first": first - begun,
        "cpu_a_gb": used / (size / 1e9),
    }
    return {**found, "size": size, "samples": samples}


def touched(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; reads one of each of its pages."""
    if tensor.is_contiguous():
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()
    else:
        tensor.select(-1, 0).sum()
    return tensor.nbytes


def processor_seconds() -> float:
    """Of this process and its children, those that ended and those that run."""
    ended = os.times()
    me = psutil.Process()
    running = [child.cpu_times() for child in me.children(recursive=True)]
    return sum(ended[:4]) + sum(each.user + each.system for each in running)


def main() -> None:
    name, action, asked = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    module = importlib.import_module(f"contenders.{name}")
    print(json.dumps({"convert": convert, "read": read}[action](module, asked)), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
    main()
