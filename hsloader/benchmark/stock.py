"""Measures the stock way with .pt files: torch.load in a torch DataLoader, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hsloader._launch import launch
from hsloader.benchmark.children import ask
from hsloader.benchmark.residency import drop, resident_share, state_of
from hsloader.benchmark.results import Measurement, State
from hsloader.benchmark.timing import Deadline

__all__ = ["measure_stock"]

_ENTRY = "hsloader.benchmark.stock_child:main"
_START_SECONDS = 60.0  # importing torch from a cold disk takes long
_MOST_SECONDS = 2.0  # of one setting
_SETTINGS = ((4, True), (0, True), (2, True), (4, False), (0, False))  # (workers, mmap)


def measure_stock(
    files: Sequence[Path],
    seconds: float,
    *,
    may_drop: bool,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Measurement]:
    """Load ``files`` for each setting of workers and mmap within ``seconds`` (the start of the process, which imports
    torch, is not counted); cold and warm if ``may_drop``: the files are ours.

    A setting that torch refuses (mmap of its old format) is left out. ``OSError`` if it refuses all, and with the
    child's last words if that dies.
    """
    child = launch(_ENTRY, name="stock loader")
    try:
        # Not among the arguments: a command line has no room for thousands of paths.
        ask(child, {"files": [str(file) for file in files]}, _START_SECONDS)
        deadline = Deadline(seconds)
        found: list[Measurement] = []
        refusal = ""
        states = ("cold", "warm") if may_drop else ("warm",)
        plans = [(workers, mapped, state) for workers, mapped in _SETTINGS for state in states]
        for number, (workers, mapped, wanted) in enumerate(plans):
            if deadline.left < 0.2 and found:
                break
            name = f"torch.load(mmap={mapped}), {workers} workers"
            progress(name)
            if wanted == "cold":
                _drop_all(files)
            state = _state(files)
            limit = deadline.share(_MOST_SECONDS, len(plans) - number)
            request = {"workers": workers, "mmap": mapped, "seconds": limit, "again": wanted == "warm"}
            answer = ask(child, request, limit + _START_SECONDS)
            if "error" in answer:
                refusal = answer["error"]
                continue
            size, elapsed = int(answer["size"]), float(answer["seconds"])
            found.append(
                Measurement(
                    part="stock",
                    name=name,
                    rate=size / elapsed if elapsed else 0.0,
                    size=size,
                    seconds=elapsed,
                    state=state,
                    settings={"workers": workers, "mmap": mapped},
                    first_seconds=float(answer["first"]),
                    cpu_seconds_a_gb=float(answer["cpu"]) / (size / 1e9) if size else None,
                )
            )
        if refusal and not found:
            raise OSError(refusal)
        return found
    finally:
        child.close(1.0)


def _drop_all(files: Sequence[Path]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            drop(fd)
        finally:
            os.close(fd)


def _state(files: Sequence[Path]) -> State:
    shares = []
    for file in files:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            shares.append(resident_share(fd))
        finally:
            os.close(fd)
    found = state_of(sum(shares) / max(1, len(shares)))
    return "cold" if found == "cold" else "warm" if found == "warm" else "mixed"
