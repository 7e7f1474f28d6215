"""Where the time inside ``next()`` goes, and how throughput depends on the reader's settings; for ``gpu.py``."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hsloader
from hsloader.reader import choices

if TYPE_CHECKING:
    from gpu import Bench

_BATCHES = 300
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def parts(bench: Bench) -> None:
    """Median microseconds of each part of ``next()``, of small and of large batches, with a pause between them.

    Parts lie inside one another: ``refill`` holds ``ask``, that ``submit`` and, of 16 batches at once, ``lay_out_all``
    and ``prepare``; ``send`` holds ``placed``, ``packed`` and ``run``, ``peek`` holds ``look``.
    """
    for name, size in (("parts_28_mb", 28e6), ("parts_100_mb", 100e6)):
        with bench.loader(bench.tokens_of(size if bench.cuda else bench.sample_bytes / 2)) as loader:
            batches = bench.endless(loader)
            bench.use_every_slot(loader, batches)
            watch = _Watch()
            connection: Any = loader._connection
            delivery, stream, transfers = connection.delivery, connection.stream, None
            if bench.cuda:
                transfers = delivery._transfers
                for part in ("retire", "hand_out", "prepare", "send", "_placed", "_packed"):
                    watch.over(transfers, part)
                watch.over(transfers._driver, "run")
            for owner, part in (
                (stream, "peek"), (stream, "ask"), (stream.client, "look"), (stream.client, "submit"),
                (stream.client, "hold"), (stream, "refill"), (stream.client, "prepare"),
                (connection.trainer, "lay_out_all"), (connection.trainer, "finish"),
            ):  # fmt: skip
                watch.over(owner, part)
            whole = []
            for _ in range(_BATCHES if bench.cuda else 20):
                time.sleep(0.01 if bench.cuda else 0.0)  # the step: what it leaves of the caches is not counted
                begun = time.perf_counter()
                next(batches)
                whole.append(time.perf_counter() - begun)
            bench.sync()
        bench.say(name, {"next_us": statistics.median(whole) * 1e6, **watch.medians()})


class _Watch:
    """Times methods of single objects."""

    def __init__(self) -> None:
        self._spent: dict[str, list[float]] = {}

    def over(self, owner: Any, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)
        spent = self._spent.setdefault(name.strip("_"), [])

        def timed(*arguments: Any, **keywords: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                spent.append(time.perf_counter() - begun)

        setattr(owner, name, timed)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(spent) * 1e6 for name, spent in self._spent.items() if spent}


def sweep(bench: Bench) -> None:
    """Throughput in other settings than the default ones."""
    cores, found = bench.cores, {}
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        f"{max(1, cores - 4)} threads": {"threads": max(1, cores - 4)},
        f"{cores} threads": {"threads": cores},
        "1 io thread": {"io_threads": 1},
        "pread": {"mode": "pread"},
        "ring of four batches": {"prefetch": None},
        "ring of 1 GiB": {"prefetch": 1 << 30},
        "ring of 4 GiB": {"prefetch": 4 << 30},
    }
    for name, options in settings.items():
        read = hsloader.ReadOptions(**{"prefetch": 2 << 30, **options})
        found[name] = bench.rate(read=read)[0] / 1e9
    usual = choices.processes_for
    for processes in (1, 2, 4):
        choices.processes_for = lambda decoders, slots=99, processes=processes: processes  # type: ignore[misc]
        found[f"{processes} processes"] = bench.rate()[0] / 1e9
    choices.processes_for = usual
    if os.access(_HUGE_PAGES, os.W_OK):
        before = _HUGE_PAGES.read_text().split("[")[1].split("]")[0]
        try:
            _HUGE_PAGES.write_text("advise")
            found["huge pages"] = bench.rate()[0] / 1e9
        finally:
            _HUGE_PAGES.write_text(before)
    bench.say("sweep", found)
