"""How fast batches come from a cold disk on the CPU, against torch.load and against the limit of the machine.

    python benchmarks/loader.py [--out FOLDER] [--data FOLDER] [--gigabytes 8]

Samples of hidden size 7168 (57 KB a token), read once an epoch, from files whose pages were dropped from the page cache
before it (``posix_fadvise`` on the benchmark's own files, nothing else).  Two epochs are told apart: the first counts
from opening, so it has the feeder's start and the ring's first pages in it, the next is that of a loader that runs.
Stock: ``torch.load`` with and without mmap, 0, 2 and 4 workers, from opening.  Limit, measured in the same run:
``min(raw disk rate x compression ratio, decoding on all cores)``, the disk's rate being the better of reads through the
page cache and past it.  Turns alternate; medians are given.  Writes ``loader.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loader_data import Samples, drop_caches, machine, own_files, state_bytes, stock_loader

import hsloader
from hsloader.benchmark.decoding import frames_of, measure_decoding
from hsloader.benchmark.timing import Deadline
from hsloader.reader.access import Buffer

_BLOCK = 4 << 20
FIRST, NEXT = "hsloader, first epoch", "hsloader, next epoch"
_DEPTH = 8  # reads at once while the raw disk is measured


def hsloader_rates(dataset: Path, tokens: int) -> dict[str, float]:
    """Bytes of batches a second over the first epoch, the start of the feeder included, and over the next."""
    rates = {}
    drop_caches(dataset)
    begun = time.perf_counter()
    with hsloader.DataLoader(
        dataset, trainer="speculators-0.9", max_tokens=2 * tokens, max_length=tokens, split="all", log_every=0
    ) as loader:  # split="train" would read into the next epoch
        for name in (FIRST, NEXT):
            size = sum(state_bytes(batch) for batch in loader)
            rates[name] = size / (time.perf_counter() - begun)
            drop_caches(dataset)
            begun = time.perf_counter()
    return rates


def stock_rate(paths: list[Path], tokens: int, *, workers: int, use_mmap: bool) -> float:
    """The same for torch's DataLoader over the ``.pt`` files, the start of its workers included."""
    drop_caches(paths[0].parent)
    begun, size = time.perf_counter(), 0
    for batch in stock_loader(paths, workers=workers, use_mmap=use_mmap, tokens=tokens, pin=False):
        size += state_bytes(batch)
    return size / (time.perf_counter() - begun)


def disk_rate(folder: Path, flags: int = 0) -> float:
    """Bytes a second of plain reads of ``folder``'s files from a cold cache, several at once."""
    drop_caches(folder)
    places = [(path, offset) for path in own_files(folder) for offset in range(0, max(1, path.stat().st_size), _BLOCK)]
    lock, done = threading.Lock(), [0]

    def work() -> None:
        room = memoryview(Buffer().take(_BLOCK))  # on pages of 2 MiB, without which O_DIRECT is half as fast
        while True:
            with lock:
                if not places:
                    return
                path, offset = places.pop(0)
            fd = os.open(path, os.O_RDONLY | flags)
            try:
                count = os.preadv(fd, [room], offset)
            finally:
                os.close(fd)
            with lock:
                done[0] += count

    begun = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(_DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done[0] / (time.perf_counter() - begun)


def decode_rate(path: Path, cores: int) -> float:
    """Bytes a second that all cores decode, from memory."""
    with hsloader.open_dataset(path) as dataset:
        frames = frames_of(dataset, 512 << 20)
    if frames is None:
        raise ValueError(f"{path}: no frames")
    (found,) = measure_decoding(frames, [cores], Deadline(10), seconds=2)
    return found.rate


def main() -> None:
    """Make the data, measure in turns, print and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder for loader.json")
    parser.add_argument("--data", default=None, help="where to make the data for the time of the run")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of decoded states")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--tokens", type=int, default=1700, help="of a sample: 97 MB at the default hidden size")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=arguments.data) as name:
        folder = Path(name)
        samples = Samples(arguments.hidden, arguments.tokens)
        count = max(4, int(arguments.gigabytes * 1e9) // samples.bytes)
        samples.write_dataset(folder / "data.hs", count, cores)
        paths = samples.write_files(folder / "files", count)
        with hsloader.open_dataset(folder / "data.hs") as dataset:
            ratio = dataset.manifest.raw_bytes / dataset.manifest.stored_bytes
        results = _measure(folder, paths, arguments, cores)
    disk = max(results["disk, page cache"], results["disk, O_DIRECT"])
    limit = min(disk * ratio, results["decode"])
    stock = {name: rate for name, rate in results.items() if name.startswith("torch.load")}
    best = max(stock, key=lambda name: stock[name])
    figures: dict[str, Any] = {
        "machine": machine(),
        "settings": vars(arguments) | {"samples": count, "sample_bytes": samples.bytes},
        "bytes_per_second": results,
        "compression_ratio": ratio,
        "limit": limit,
        "limited_by": "disk" if disk * ratio < results["decode"] else "decode",
        "share_of_limit": {name: results[name] / limit for name in (FIRST, NEXT)},
        "best_stock": best,
        "times_stock": {name: results[name] / stock[best] for name in (FIRST, NEXT)},
    }
    (Path(arguments.out) / "loader.json").write_text(json.dumps(figures, indent=2))
    for name, rate in results.items():
        print(f"{name:28} {rate / 1e9:7.3f} GB/s")
    print(f"{'limit (' + figures['limited_by'] + ')':28} {limit / 1e9:7.3f} GB/s, ratio {ratio:.3f}")
    for name in (FIRST, NEXT):
        share, times = figures["share_of_limit"][name], figures["times_stock"][name]
        print(f"{name}: {share:.3f} of the limit, {times:.2f} times {best}")


def _measure(folder: Path, paths: list[Path], arguments: argparse.Namespace, cores: int) -> dict[str, float]:
    """Medians by name."""
    dataset, tokens = folder / "data.hs", arguments.tokens
    turns: dict[str, Callable[[], float | dict[str, float]]] = {
        "disk, page cache": lambda: disk_rate(dataset),
        "disk, O_DIRECT": lambda: disk_rate(dataset, os.O_DIRECT),
        "hsloader": lambda: hsloader_rates(dataset, tokens),
        "decode": lambda: decode_rate(dataset, cores),
    }
    for workers in (0, 2, 4):
        for use_mmap in (False, True):
            name = f"torch.load, {workers} workers{', mmap' if use_mmap else ''}"
            turns[name] = lambda workers=workers, use_mmap=use_mmap: stock_rate(  # type: ignore[misc]
                paths, tokens, workers=workers, use_mmap=use_mmap
            )
    found: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name, measure in turns.items():
            rate = measure()
            for each, value in rate.items() if isinstance(rate, dict) else [(name, rate)]:
                found.setdefault(each, []).append(value)
    return {name: statistics.median(rates) for name, rates in found.items()}


if __name__ == "__main__":
    main()
